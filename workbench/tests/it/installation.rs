//! `scripts/install`, with a package manager that only pretends.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory that is all of `PATH`: the tools that the script needs, and what a test puts there.
struct Programs {
    directory: PathBuf,
}

impl Programs {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("install-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        for tool in ["bash", "cat", "chmod", "env", "grep", "mktemp", "rm", "tee"] {
            let found = std::env::split_paths(&std::env::var_os("PATH").unwrap())
                .map(|path| path.join(tool))
                .find(|file| file.is_file())
                .unwrap_or_else(|| panic!("{tool} is in PATH"));
            std::os::unix::fs::symlink(found, directory.join(tool)).unwrap();
        }
        let path = Self { directory };
        path.program("sleep", "");
        path.program("sudo", "shift\nexec \"$@\"");
        path
    }

    fn program(&self, name: &str, script: &str) {
        let file = self.directory.join(name);
        fs::write(
            &file,
            format!("#!{}/bash\n{script}\n", self.directory.display()),
        )
        .unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn install(&self, thing: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/install");
        Command::new(self.directory.join("bash"))
            .arg(script)
            .arg(thing)
            .env("PATH", &self.directory)
            .output()
            .unwrap()
    }

    /// What the package manager was asked for, a line each.
    fn asked(&self) -> String {
        fs::read_to_string(self.directory.join("asked")).unwrap()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// An `apt-get` whose locks another holds until it has been asked three times for each of its works.
fn locked_apt_get(directory: &Path) -> String {
    let directory = directory.display();
    format!(
        r#"
        while [[ $1 == -o ]]; do shift 2; done
        echo "$1" >>{directory}/asked
        echo "$1" >>{directory}/asked.$1
        lines=($(<{directory}/asked.$1))
        if ((${{#lines[@]}} < 3)); then
            echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)" >&2
            exit 100
        fi
        if [[ $1 == install ]]; then
            printf '#!%s/bash\n' {directory} >{directory}/cc
            chmod +x {directory}/cc
        fi"#
    )
}

#[test]
fn apt_get_is_retried_while_another_process_holds_its_locks() {
    let path = Programs::new("locked");
    path.program("apt-get", &locked_apt_get(&path.directory));
    let output = path.install("compiler");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        path.asked(),
        "update\nupdate\nupdate\ninstall\ninstall\ninstall\n"
    );
}

#[test]
fn apt_get_is_not_retried_after_another_failure() {
    let path = Programs::new("failing");
    let asked = path.directory.join("asked");
    path.program(
        "apt-get",
        &format!(
            "while [[ $1 == -o ]]; do shift 2; done\necho \"$1\" >>{}\n\
             echo 'Waiting for cache lock: Could not get lock' >&2\n\
             echo 'E: Unable to locate package gcc' >&2\nexit 100",
            asked.display()
        ),
    );
    let output = path.install("compiler");
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(path.asked(), "update\ninstall\n");
}
