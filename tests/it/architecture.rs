//! The map of ARCHITECTURE.md: the floors of the modules, and the imports between them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The floor of each module, as the table of the page has it.
fn floors() -> BTreeMap<String, u32> {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut floors = BTreeMap::new();
    for row in page.lines() {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        if let [_, floor, modules, ..] = cells[..] {
            if let Ok(floor) = floor.parse() {
                let modules = modules.split(", ").map(|name| name.trim_matches('`'));
                floors.extend(modules.map(|module| (module.to_owned(), floor)));
            }
        }
    }
    floors
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Each module with the modules that its code names. Comments and unit tests are left out.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let mut files = Vec::new();
    let source = root().join("src");
    sources(&source, &mut files);
    let mut imports = BTreeMap::<_, BTreeSet<_>>::new();
    for file in files {
        let inside = file.strip_prefix(&source).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap();
        let module = module.trim_end_matches(".rs");
        let named = imports.entry(module.to_owned()).or_default();
        let code = fs::read_to_string(&file).unwrap();
        for line in code.lines().take_while(|line| !is_test(line)) {
            let code = line.split("//").next().unwrap();
            for path in code.split("crate::").skip(1) {
                let end = path.find(|c: char| !c.is_alphanumeric() && c != '_');
                named.insert(path[..end.unwrap_or(path.len())].to_owned());
            }
        }
        named.remove(module);
    }
    imports
}

fn is_test(line: &str) -> bool {
    line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test")
}

#[test]
fn the_map_has_each_module() {
    let on_the_map: BTreeSet<_> = floors().into_keys().collect();
    let modules: BTreeSet<_> = imports().into_keys().collect();
    assert_eq!(on_the_map, modules);
}

#[test]
fn the_map_has_each_room_of_a_primitive() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, map) = page.split_once("\n## Map of the code\n").unwrap();
    let (map, _) = map.split_once("\n## ").unwrap();
    let mut seen = 0;
    for directory in fs::read_dir(root().join("src")).unwrap() {
        let directory = directory.unwrap().path();
        if !directory.join("sql.rs").exists() {
            continue;
        }
        for room in fs::read_dir(&directory).unwrap() {
            let room = room.unwrap().path();
            let name = room.file_name().unwrap().to_str().unwrap();
            let is_listed = room.is_dir() || map.contains(&format!("`{name}`"));
            assert!(is_listed, "{} is not on the map", room.display());
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} rooms were found");
}

#[test]
fn no_module_imports_one_of_a_higher_floor_or_one_that_imports_it() {
    let (floors, imports) = (floors(), imports());
    let mut seen = 0;
    for (module, named) in &imports {
        for import in named.iter().filter(|import| floors.contains_key(*import)) {
            assert!(
                floors[import] <= floors[module],
                "{module} imports {import}"
            );
            let back = reachable(&imports, import);
            assert!(
                !back.contains(module),
                "{module} and {import} form a circle"
            );
            seen += 1;
        }
    }
    assert!(seen > 50, "only {seen} imports were found");
}

fn reachable(imports: &BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from.to_owned()];
    while let Some(module) = next.pop() {
        for import in imports.get(&module).into_iter().flatten() {
            if reached.insert(import.clone()) {
                next.push(import.clone());
            }
        }
    }
    reached
}

/// Whether a room of a primitive, with the files of its folder, names another room.
fn names(primitive: &Path, room: &str, other: &str) -> bool {
    let mut files = vec![primitive.join(room).with_extension("rs")];
    let folder = primitive.join(room);
    if folder.is_dir() {
        sources(&folder, &mut files);
    }
    let of_the_other = [
        format!("super::{other};"),
        format!("super::{other}::"),
        format!("super::super::{other}::"),
        format!(
            "::{}::{other}::",
            primitive.file_name().unwrap().to_str().unwrap()
        ),
    ];
    files.iter().any(|file| {
        let code = fs::read_to_string(file).unwrap();
        let lines = code.lines().take_while(|line| !is_test(line));
        lines
            .into_iter()
            .any(|line| of_the_other.iter().any(|path| line.contains(path)))
    })
}

#[test]
fn the_rules_and_the_statements_of_a_primitive_do_not_name_each_other() {
    let mut named = 0;
    for directory in fs::read_dir(root().join("src")).unwrap() {
        let primitive = directory.unwrap().path();
        if primitive.join("sql.rs").exists() {
            let (one, other) = (
                names(&primitive, "rules", "sql"),
                names(&primitive, "sql", "rules"),
            );
            assert!(!(one && other), "{}", primitive.display());
            named += u32::from(one) + u32::from(other);
        }
    }
    assert!(named >= 3, "{named}");
}
