//! Where the settings of a session come from, and so where they can be changed.

use diesel::pg::PgConnection;
use diesel::{QueryResult, RunQueryDsl};
use serde_json::{Map, Value};

use crate::database::{Json, parsed};

#[derive(Debug)]
pub(super) struct Origin(Value);

impl Origin {
    /// Must run before this program has changed a setting of the session. No name in the statement
    /// is looked up by the search path, which is one of the examined settings. A session gets the
    /// settings of the role that has logged in, also if one of them is `role`.
    pub(super) fn of(conn: &mut PgConnection) -> QueryResult<Self> {
        const ORIGIN: &str = "
            SELECT pg_catalog.json_build_object(
                'role', pg_catalog.quote_ident(session_user::pg_catalog.text),
                'database', pg_catalog.quote_ident(pg_catalog.current_database()::pg_catalog.text),
                'of_client', (SELECT pg_catalog.json_agg(s.name) FROM pg_catalog.pg_settings AS s
                    WHERE s.source OPERATOR(pg_catalog.=) 'client'::pg_catalog.text)
            )::pg_catalog.text AS rows";
        let json: Json = diesel::sql_query(ORIGIN).get_result(conn)?;
        parsed(&json).map(Self)
    }

    /// The statements that set these settings, or why no statement would help.
    pub(super) fn remedy(&self, settings: &Map<String, Value>) -> Result<String, String> {
        let of_client = self.0["of_client"].as_array();
        let is_of_client = |name: &String| {
            of_client.is_some_and(|all| all.iter().any(|it| it.as_str() == Some(name)))
        };
        if let Some(name) = settings.keys().find(|name| is_of_client(name)) {
            return Err(format!(
                "the connection itself sets {name}, which overrides what its role has: take it out \
                    of the options of DATABASE_URL and of PGOPTIONS"
            ));
        }
        let member = |name: &str| self.0[name].as_str().unwrap_or_default();
        let (role, database) = (member("role"), member("database"));
        let statements = settings.iter().map(|(name, value)| {
            let value = value.as_str().unwrap_or_default();
            // A list is written as words, everything else as a string.
            let value = match name.as_str() {
                "search_path" => value.to_owned(),
                _ => format!("'{value}'"),
            };
            format!("ALTER ROLE {role} IN DATABASE {database} SET {name} = {value};")
        });
        let sql = statements.collect::<Vec<_>>().join(" ");
        Ok(if settings.contains_key("default_transaction_read_only") {
            format!("BEGIN READ WRITE; {sql} COMMIT;")
        } else {
            sql
        })
    }
}
