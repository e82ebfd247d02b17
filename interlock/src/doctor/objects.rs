//! Compares the objects of the schema with the migrations of this release: the text and settings of
//! each function, the columns of each table, and the plan of each view. `diesel_interlock` itself
//! checks only that the objects exist.

use diesel::QueryResult;
use diesel::pg::PgConnection;
use diesel_interlock::migrations;
use serde_json::{Value, json};

use crate::database::{changed, execute, plan, rows, rows_with};

/// A function as its migration writes it.
#[derive(Debug)]
struct Function {
    version: &'static str,
    name: &'static str,
    settings: Vec<String>,
    /// As PostgreSQL stores it. PostgreSQL stores an expression in parsed form, so an expression
    /// has no spaces, parentheses and casts here.
    body: String,
}

/// A column of a table as its migration writes it.
#[derive(Debug)]
struct Column {
    table: &'static str,
    name: &'static str,
    definition: String,
}

/// A view as its migration writes it.
#[derive(Debug)]
struct View {
    version: &'static str,
    name: &'static str,
    query: &'static str,
}

/// A difference, and the remedy.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) found: String,
    pub(crate) why: String,
    pub(crate) sql: String,
    pub(crate) shell: String,
    version: Option<&'static str>,
}

const REPAIR: &str = "interlock install --repair";

/// The version that a migration records.
fn version(text: &'static str) -> &'static str {
    let recorded = text.split_once("(version) VALUES ('").map(|(_, rest)| rest);
    recorded
        .and_then(|rest| rest.split_once('\''))
        .map_or("", |(version, _)| version)
}

fn functions(text: &'static str) -> Vec<Function> {
    let mut found = Vec::new();
    for piece in text
        .split("CREATE OR REPLACE FUNCTION resource_control.")
        .skip(1)
    {
        let name = piece.split('(').next().unwrap_or_default();
        let ends = ["AS $$", "\n    RETURN "]
            .into_iter()
            .filter_map(|end| piece.find(end));
        let Some(end) = ends.min() else {
            continue;
        };
        let (head, rest) = piece.split_at(end);
        let settings = head
            .lines()
            .filter_map(|line| line.trim().strip_prefix("SET "));
        found.push(Function {
            version: version(text),
            name,
            settings: settings.map(|it| it.replacen(" = ", "=", 1)).collect(),
            body: match rest.strip_prefix("AS $$") {
                Some(rest) => rest.split("$$").next().unwrap_or_default().to_owned(),
                None => simple(rest.split(';').next().unwrap_or_default()),
            },
        });
    }
    found
}

/// An expression without what PostgreSQL writes differently from its author.
fn simple(expression: &str) -> String {
    let text = expression.replace(" AS ", " ").replace("::text", "");
    text.replace(|c: char| c.is_whitespace() || "()".contains(c), "")
}

/// The columns of each table: a line that begins with a column's name, and its continuation lines.
fn columns(text: &'static str) -> Vec<Column> {
    const CREATE: &str = "CREATE TABLE IF NOT EXISTS resource_control.";
    let mut found: Vec<Column> = Vec::new();
    for piece in text.split(CREATE).skip(1) {
        let table = piece.split(' ').next().unwrap_or_default();
        let body = piece.split("\n)").next().unwrap_or_default();
        let first = found.len();
        for line in body
            .lines()
            .skip(1)
            .filter(|line| !line.trim().starts_with("--"))
        {
            let is_column =
                line.starts_with("    ") && line[4..].starts_with(|c: char| c.is_ascii_lowercase());
            if is_column {
                let name = line.trim().split(' ').next().unwrap_or_default();
                found.push(Column {
                    table,
                    name,
                    definition: String::new(),
                });
            }
            if let Some(column) = found[first..].last_mut() {
                let is_of_table = line.starts_with("    PRIMARY KEY");
                if !is_of_table {
                    column.definition += line.trim();
                    column.definition.push(' ');
                }
            }
        }
    }
    for column in &mut found {
        column.definition = column.definition.trim().trim_end_matches(',').to_owned();
    }
    found
}

fn views(text: &'static str) -> impl Iterator<Item = View> {
    let pieces = text.split("CREATE OR REPLACE VIEW resource_control.");
    pieces.skip(1).filter_map(move |piece| {
        let (name, rest) = piece.split_once(" AS\n")?;
        let (query, _) = rest.split_once(';')?;
        Some(View {
            version: version(text),
            name,
            query,
        })
    })
}

/// PostgreSQL stores a view in parsed form, and each version prints it differently. So the plan of
/// the view is compared with the plan of the query in its migration.
fn differing_view(conn: &mut PgConnection, view: &View) -> QueryResult<Option<Difference>> {
    const COLUMNS: &str = "
        SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) AS names FROM pg_attribute
        WHERE attrelid = to_regclass('resource_control.' || $1)::oid AND attnum > 0";
    let View {
        version,
        name,
        query,
    } = view;
    let columns = rows_with(conn, COLUMNS, name)?;
    let Some(columns) = columns.first().and_then(|row| row["names"].as_str()) else {
        return Ok(None);
    };
    let migrations = |what: &str| format!("SELECT {what} FROM ({query}) AS {name}");
    // Fails for want of a right or of a column, and under row security. Other questions report these.
    let Ok(wanted) = plan(conn, &migrations("*")) else {
        return Ok(None);
    };
    let (why, sql) = if plan(conn, &migrations(columns)).is_err() {
        (
            "its columns are others, too: drop it with what depends on it, let its migration create \
                it again, and grant it again with grants.sql",
            format!("DROP VIEW resource_control.{name} CASCADE;"),
        )
    } else if plan(conn, &format!("SELECT * FROM resource_control.{name}"))? != wanted {
        ("its migration restores it", String::new())
    } else {
        return Ok(None);
    };
    Ok(Some(Difference {
        found: format!(
            "the view resource_control.{name} is not that of this release: it was replaced, or is \
                of another release"
        ),
        why: why.to_owned(),
        sql,
        shell: REPAIR.to_owned(),
        version: Some(version),
    }))
}

/// The differences from this release. Missing functions and tables are left out, because
/// `migrations::check` reports them.
pub(crate) fn differences(conn: &mut PgConnection) -> QueryResult<Vec<Difference>> {
    const FUNCTIONS: &str = "
        SELECT p.proname AS name, p.prosrc AS body, pg_get_function_sqlbody(p.oid) AS expression,
            COALESCE(to_json(p.proconfig), '[]') AS settings,
            p.prosecdef AS is_definer, l.lanname AS language
        FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
        WHERE p.pronamespace = to_regnamespace('resource_control')";
    const COLUMNS: &str = "
        SELECT w.tab AS name, w.col FROM json_to_recordset($1::json) AS w (tab text, col text)
            JOIN pg_class AS c ON c.relname = w.tab AND c.relnamespace = \
            to_regnamespace('resource_control')
        WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attname = w.col AND NOT a.attisdropped)";
    let mut all = Vec::new();
    let installed = rows(conn, FUNCTIONS)?;
    for function in migrations::texts().flat_map(functions) {
        let same_name: Vec<_> = installed
            .iter()
            .filter(|it| it["name"] == function.name)
            .collect();
        let is_same = |it: &&&Value| {
            let body = match it["expression"].as_str() {
                Some(expression) => simple(expression),
                None => it["body"].as_str().unwrap_or_default().to_owned(),
            };
            body == function.body
                && it["settings"] == json!(function.settings)
                && it["is_definer"] == false
        };
        let name = function.name;
        if same_name.len() == 1 && same_name.iter().all(|it| is_same(&it)) || same_name.is_empty() {
            continue;
        }
        let why = if same_name.len() > 1 {
            format!(
                "there are {} functions of that name: drop those that are not of this release",
                same_name.len()
            )
        } else {
            "its migration restores it".to_owned()
        };
        all.push(Difference {
            found: format!(
                "the function resource_control.{name} is not that of this release: it \
                was replaced, or is of another release"
            ),
            why,
            sql: String::new(),
            shell: REPAIR.to_owned(),
            version: Some(function.version),
        });
    }
    for view in migrations::texts().flat_map(views) {
        all.extend(differing_view(conn, &view)?);
    }
    let columns: Vec<_> = migrations::texts().flat_map(columns).collect();
    let wanted = columns
        .iter()
        .map(|it| json!({"tab": it.table, "col": it.name}));
    let wanted = Value::from_iter(wanted).to_string();
    for missing in rows_with(conn, COLUMNS, &wanted)? {
        let is_it = |it: &&Column| missing["name"] == it.table && missing["col"] == it.name;
        let Some(Column {
            table,
            name,
            definition,
        }) = columns.iter().find(is_it)
        else {
            continue;
        };
        let is_filled = !definition.contains("NOT NULL") || definition.contains("DEFAULT");
        let (why, sql, shell) = if is_filled && !definition.contains("PRIMARY KEY") {
            (
                "add it",
                format!("ALTER TABLE resource_control.{table} ADD COLUMN {definition};"),
                "",
            )
        } else {
            let sql = format!("DROP TABLE resource_control.{table} CASCADE;");
            (
                "without it the other columns are of no use: drop the table with its rows, and let \
                    the migration create it again, empty",
                sql,
                REPAIR,
            )
        };
        all.push(Difference {
            found: format!("resource_control.{table} lacks the column {name}"),
            why: why.to_owned(),
            sql,
            shell: shell.to_owned(),
            version: None,
        });
    }
    Ok(all)
}

/// Adds missing columns, and marks the migrations whose functions were replaced, or whose objects
/// are missing, as not installed, so that they run again. Returns their versions.
pub(crate) fn forget_differing(conn: &mut PgConnection) -> QueryResult<Vec<String>> {
    const IS_THERE: &str =
        "SELECT to_regclass('resource_control.installed_migration') IS NOT NULL AS is_there";
    const FORGET: &str = "DELETE FROM resource_control.installed_migration AS m
        USING json_array_elements_text($1::json) AS v (version) WHERE m.version = v.version
            RETURNING m.version";
    if rows(conn, IS_THERE)?
        .iter()
        .any(|row| row["is_there"] == false)
    {
        return Ok(Vec::new());
    }
    let differing = differences(conn)?;
    // The columns first, because missing objects may need them.
    for column in differing
        .iter()
        .filter(|it| it.sql.starts_with("ALTER TABLE"))
    {
        execute(conn, &column.sql)?;
    }
    let mut versions: Vec<_> = differing.iter().filter_map(|it| it.version).collect();
    for text in migrations::texts() {
        let names: Vec<_> = migrations::objects(text).collect();
        if !missing(conn, &names)?.is_empty() {
            versions.push(version(text));
        }
    }
    let forgotten = changed(conn, FORGET, &json!(versions).to_string())?;
    let version = |row: &Value| row["version"].as_str().map(str::to_owned);
    Ok(forgotten.iter().filter_map(version).collect())
}

/// Marks the migrations as installed again, because they have failed and changed nothing.
pub(crate) fn remember(conn: &mut PgConnection, versions: &[String]) -> QueryResult<()> {
    const REMEMBER: &str = "INSERT INTO resource_control.installed_migration (version)
        SELECT v.version FROM json_array_elements_text($1::json) AS v (version)
        ON CONFLICT DO NOTHING RETURNING version";
    changed(conn, REMEMBER, &json!(versions).to_string()).map(drop)
}

fn missing(conn: &mut PgConnection, names: &[&str]) -> QueryResult<Vec<Value>> {
    const MISSING: &str = "
        SELECT name FROM json_array_elements_text($1::json) AS w (name)
        WHERE NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = \
        to_regnamespace('resource_control') AND relname = name)
            AND NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = \
            to_regnamespace('resource_control') AND proname = name)
            AND NOT EXISTS (SELECT FROM pg_type WHERE typnamespace = \
            to_regnamespace('resource_control') AND typname = name)";
    rows_with(conn, MISSING, &json!(names).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_and_columns_are_parsed_from_the_migrations() {
        let functions: Vec<_> = migrations::texts().flat_map(functions).collect();
        assert!(functions.len() >= 13, "{functions:#?}");
        let is_whole = |it: &Function| it.body.contains("BEGIN\n") || it.body.starts_with("RETURN");
        assert!(functions.iter().all(is_whole), "{functions:#?}");
        let claim = functions
            .iter()
            .find(|it| it.name == "claim_service_request")
            .unwrap();
        assert_eq!(claim.settings[0], "search_path=pg_catalog, pg_temp");
        assert_eq!(claim.settings.len(), 4);
        let views: Vec<_> = migrations::texts().flat_map(views).collect();
        assert!(views.len() >= 6, "{views:#?}");
        let is_whole = |it: &View| it.query.contains("\n        FROM ");
        assert!(views.iter().all(is_whole), "{views:#?}");
        let columns: Vec<_> = migrations::texts().flat_map(columns).collect();
        assert!(columns.len() >= 45, "{columns:#?}");
        let of = |table: &str, name: &str| {
            let mut found = columns
                .iter()
                .filter(|it| it.table == table && it.name == name);
            found.next().unwrap().definition.clone()
        };
        assert_eq!(
            of("throttle", "details"),
            "details text NOT NULL DEFAULT ''"
        );
        assert!(
            of("throttled_resource", "throttle_interval")
                .ends_with("BETWEEN 1e-6 AND 31557600000)")
        );
        assert_eq!(of("service_request", "claim"), "claim bigint");
    }
}
