//! Compares the objects of the schema with the migrations of this release: the text, the signature
//! and the settings of each function, the columns of each table, and the plan of each view.
//! `diesel_interlock` itself checks only that the objects exist.

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
    /// `name type` of each parameter, with `OUT` before those of the result, and without defaults.
    parameters: Vec<String>,
    /// None if the parameters with `OUT` are the result.
    result: Option<&'static str>,
    /// The line of the language, with what it says about the calls of the function.
    calls: &'static str,
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
        let lines = || head.lines().map(str::trim);
        let settings = lines().filter_map(|line| line.strip_prefix("SET "));
        let (parameters, result) = match head.split_once("RETURNS ") {
            Some((before, after)) => (before, after.split_whitespace().next()),
            None => (head.split("LANGUAGE").next().unwrap_or_default(), None),
        };
        let parameters = parameters.trim().trim_start_matches(name);
        let parameters = parameters.trim_start_matches('(').trim_end_matches(')');
        let parameters = parameters.split(',').map(|it| {
            let it = it.split(" DEFAULT").next().unwrap_or_default();
            it.trim().to_owned()
        });
        found.push(Function {
            version: version(text),
            name,
            parameters: parameters.filter(|it| !it.is_empty()).collect(),
            result,
            calls: lines()
                .find(|it| it.starts_with("LANGUAGE "))
                .unwrap_or_default(),
            settings: settings.map(|it| it.replacen(" = ", "=", 1)).collect(),
            body: match rest.strip_prefix("AS $$") {
                Some(rest) => rest.split("$$").next().unwrap_or_default().to_owned(),
                None => simple(rest.split(';').next().unwrap_or_default()),
            },
        });
    }
    found
}

impl Function {
    /// What a function of PostgreSQL must have so that `CREATE OR REPLACE` replaces it: its input
    /// types, the names of all parameters, and its result.
    fn signature(&self) -> Value {
        let words = self
            .parameters
            .iter()
            .map(|it| it.split(' ').collect::<Vec<_>>());
        let inputs = words.clone().filter(|it| it[0] != "OUT");
        let inputs: Vec<_> = inputs.map(|it| it[1]).collect();
        let names = words.map(|it| if it[0] == "OUT" { it[1] } else { it[0] });
        json!({
            "name": self.name,
            "signature": format!("resource_control.{}({})", self.name, inputs.join(",")),
            "parameters": names.collect::<Vec<_>>(),
            "result": self.result.unwrap_or("record"),
        })
    }

    fn is(&self, installed: &Value) -> bool {
        let has = |word: &str| self.calls.contains(word);
        let volatility = match self.calls {
            _ if has("IMMUTABLE") => "i",
            _ if has("STABLE") => "s",
            _ => "v",
        };
        let parallel = if has("PARALLEL SAFE") { "s" } else { "u" };
        let body = match installed["expression"].as_str() {
            Some(expression) => simple(expression),
            None => installed["body"].as_str().unwrap_or_default().to_owned(),
        };
        body == self.body
            && installed["is_fit"] == true
            && installed["settings"] == json!(self.settings)
            && installed["is_definer"] == false
            && installed["is_strict"] == has("STRICT")
            && installed["volatility"] == volatility
            && installed["parallel"] == parallel
            && self.calls.split(' ').nth(1) == installed["language"].as_str()
    }
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

impl Column {
    /// The definition up to the first word that is no part of the type.
    fn kind(&self) -> &str {
        let rest = self.definition[self.name.len()..].trim();
        let ends = [
            "COLLATE",
            "NOT NULL",
            "DEFAULT",
            "GENERATED",
            "PRIMARY",
            "CONSTRAINT",
        ];
        let ends = ends.iter().filter_map(|end| rest.find(end));
        rest[..ends.min().unwrap_or(rest.len())].trim()
    }

    fn has(&self, words: &str) -> bool {
        self.definition.contains(words)
    }

    fn is_required(&self) -> bool {
        self.has("NOT NULL") || self.has("PRIMARY KEY")
    }

    /// The type with its collation, as `ALTER TABLE` sets it.
    fn set_kind(&self) -> String {
        let collation = if self.has("COLLATE") {
            " COLLATE pg_catalog.\"C\""
        } else {
            ""
        };
        let (name, kind) = (self.name, self.kind());
        format!("ALTER {name} TYPE {kind}{collation} USING {name}::{kind}")
    }

    fn set_default(&self) -> String {
        let name = self.name;
        match self.definition.split_once(" DEFAULT ") {
            Some((_, rest)) => {
                let default = rest.split(" CONSTRAINT ").next().unwrap_or_default();
                format!("ALTER {name} SET DEFAULT {default}")
            }
            None => format!("ALTER {name} DROP DEFAULT"),
        }
    }

    /// The difference of a column that is there.
    fn differs(&self, how: &Value) -> Difference {
        let Self { table, name, .. } = self;
        let null = if self.is_required() { "SET" } else { "DROP" };
        let actions = [
            ("has_kind", self.set_kind()),
            ("has_null", format!("ALTER {name} {null} NOT NULL")),
            ("has_default", self.set_default()),
        ];
        let actions: Vec<_> = actions
            .into_iter()
            .filter(|(member, _)| how[*member] == false)
            .map(|(_, action)| action)
            .collect();
        let alter = format!(
            "ALTER TABLE resource_control.{table} {};",
            actions.join(", ")
        );
        // PostgreSQL changes no type of a column that a view reads.
        let views = how["views"].as_str().filter(|_| how["has_kind"] == false);
        let (sql, shell) = match views {
            Some(views) => (format!("DROP VIEW {views} CASCADE; {alter}"), REPAIR),
            None => (alter, ""),
        };
        Difference {
            found: format!(
                "the column {name} of resource_control.{table} is not that of this release ({})",
                self.definition
            ),
            why: "as the owner".to_owned(),
            sql,
            shell: shell.to_owned(),
            version: None,
        }
    }
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
    } else {
        match plan(conn, &format!("SELECT * FROM resource_control.{name}")) {
            Ok(found) if found != wanted => ("its migration restores it", String::new()),
            _ => return Ok(None),
        }
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
            COALESCE(to_json(p.proconfig), '[]') AS settings, p.oid::regprocedure::text AS routine,
            p.prosecdef AS is_definer, p.proisstrict AS is_strict, p.provolatile AS volatility,
            p.proparallel AS parallel, l.lanname AS language,
            p.prokind = 'f' AND p.oid = to_regprocedure(w.signature)::oid
                AND p.prorettype = to_regtype(w.result)::oid
                AND COALESCE(to_json(p.proargnames), '[]')::text = w.parameters::text AS is_fit
        FROM json_to_recordset($1::json)
                AS w (name text, signature text, parameters json, result text)
            JOIN pg_proc AS p ON p.proname = w.name
            JOIN pg_language AS l ON l.oid = p.prolang
        WHERE p.pronamespace = to_regnamespace('resource_control')";
    const COLUMNS: &str = "
        SELECT w.tab AS name, w.col, a.attnum IS NULL AS is_missing,
            a.atttypid = t.oid AND a.atttypmod = -1 AND a.attcollation = CASE WHEN w.is_c
                THEN 'pg_catalog.\"C\"'::regcollation::oid ELSE t.typcollation END AS has_kind,
            a.attnotnull = w.is_required AS has_null,
            a.atthasdef = w.is_filled AND a.attgenerated = '' AS has_default,
            (SELECT string_agg(DISTINCT r.ev_class::regclass::text, ', ')
                FROM pg_depend AS d JOIN pg_rewrite AS r ON r.oid = d.objid
                WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid = c.oid
                    AND d.refobjsubid = a.attnum AND r.ev_class <> c.oid) AS views
        FROM json_to_recordset($1::json) AS w (tab text, col text, kind text, is_c boolean,
                is_required boolean, is_filled boolean)
            JOIN pg_class AS c ON c.relname = w.tab AND c.relnamespace = \
            to_regnamespace('resource_control')
            LEFT JOIN pg_attribute AS a
                ON a.attrelid = c.oid AND a.attname = w.col AND NOT a.attisdropped
            LEFT JOIN pg_type AS t ON t.oid = to_regtype(w.kind)";
    const OTHERS: &str = "
        SELECT c.relname AS name, quote_ident(a.attname) AS col
        FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
        WHERE c.relnamespace = to_regnamespace('resource_control') AND a.attnum > 0
            AND a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' AND NOT a.attisdropped
            AND c.relname IN (SELECT w.tab FROM json_to_recordset($1::json) AS w (tab text))
            AND NOT EXISTS (SELECT FROM json_to_recordset($1::json) AS w (tab text, col text)
                WHERE w.tab = c.relname AND w.col = a.attname)";
    let mut all = Vec::new();
    let functions: Vec<_> = migrations::texts().flat_map(functions).collect();
    let signatures = Value::from_iter(functions.iter().map(Function::signature)).to_string();
    let installed = rows_with(conn, FUNCTIONS, &signatures)?;
    for function in &functions {
        let name = function.name;
        let same_name = || installed.iter().filter(|it| it["name"] == name);
        let (mut is_there, mut is_known) = (false, false);
        let mut others = Vec::new();
        for it in same_name() {
            is_known = true;
            is_there |= function.is(it);
            if it["is_fit"] != true {
                others.extend(
                    it["routine"]
                        .as_str()
                        .map(|it| format!("DROP ROUTINE {it};")),
                );
            }
        }
        if !is_known || is_there && others.is_empty() {
            continue;
        }
        let (why, shell) = match (others.is_empty(), is_there) {
            (true, _) => ("its migration restores it", REPAIR),
            (false, true) => ("another one of that name is in its way: as its owner", ""),
            (false, false) => (
                "its parameters or its result are others, too: as its owner, drop it, let its \
                    migration create it again, and grant it again with grants.sql",
                REPAIR,
            ),
        };
        all.push(Difference {
            found: format!(
                "the function resource_control.{name} is not that of this release: it \
                was replaced, or is of another release"
            ),
            why: why.to_owned(),
            sql: others.join(" "),
            shell: shell.to_owned(),
            version: (!is_there).then_some(function.version),
        });
    }
    for view in migrations::texts().flat_map(views) {
        all.extend(differing_view(conn, &view)?);
    }
    let columns: Vec<_> = migrations::texts().flat_map(columns).collect();
    let wanted = columns.iter().map(|it| {
        json!({"tab": it.table, "col": it.name, "kind": it.kind(), "is_c": it.has("COLLATE"),
            "is_required": it.is_required(), "is_filled": it.has("DEFAULT")})
    });
    let wanted = Value::from_iter(wanted).to_string();
    for other in rows_with(conn, OTHERS, &wanted)? {
        let text = |member: &str| other[member].as_str().unwrap_or_default();
        let (table, name) = (text("name"), text("col"));
        all.push(Difference {
            found: format!(
                "resource_control.{table} has the column {name} of others, which may not be null, \
                    so nothing can be inserted"
            ),
            why: "as the owner".to_owned(),
            sql: format!("ALTER TABLE resource_control.{table} ALTER {name} DROP NOT NULL;"),
            shell: String::new(),
            version: None,
        });
    }
    for found in rows_with(conn, COLUMNS, &wanted)? {
        let is_it = |it: &&Column| found["name"] == it.table && found["col"] == it.name;
        let Some(column) = columns.iter().find(is_it) else {
            continue;
        };
        if found["is_missing"] == false {
            let is_other = |member: &&str| found[*member] == false;
            if ["has_kind", "has_null", "has_default"].iter().any(is_other) {
                all.push(column.differs(&found));
            }
            continue;
        }
        let Column {
            table,
            name,
            definition,
        } = column;
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
        .filter(|it| it.sql.contains(" ADD COLUMN "))
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
        assert_eq!(claim.calls, "LANGUAGE plpgsql VOLATILE");
        assert_eq!(claim.parameters[4..6], ["claim bigint", "OUT id bigint"]);
        assert_eq!(claim.signature()["result"], "record");
        assert_eq!(
            claim.signature()["signature"],
            "resource_control.claim_service_request(text,integer,interval,text,bigint)"
        );
        let views: Vec<_> = migrations::texts().flat_map(views).collect();
        assert!(views.len() >= 6, "{views:#?}");
        let is_whole = |it: &View| it.query.contains("\n        FROM ");
        assert!(views.iter().all(is_whole), "{views:#?}");
        let columns: Vec<_> = migrations::texts().flat_map(columns).collect();
        assert!(columns.len() >= 45, "{columns:#?}");
        let column = |table: &str, name: &str| {
            let is_it = |it: &&Column| it.table == table && it.name == name;
            columns.iter().find(is_it).unwrap()
        };
        let of = |table: &str, name: &str| column(table, name).definition.clone();
        let expires_at = column("service_request", "expires_at");
        assert_eq!(expires_at.kind(), "resource_control.request_expiry");
        assert_eq!(
            expires_at.set_default(),
            "ALTER expires_at SET DEFAULT clock_timestamp() + '90 seconds'"
        );
        assert_eq!(
            column("fence", "name").set_kind(),
            "ALTER name TYPE text COLLATE pg_catalog.\"C\" USING name::text"
        );
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
