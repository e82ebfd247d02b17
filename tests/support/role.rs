//! Roles without rights.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::Database;

/// A role that may only connect, dropped with the value.
pub(crate) struct Role {
    name: String,
    database: String,
    url: String,
}

impl Role {
    pub(crate) fn new(database: &Database) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("interlock_test_{}_{number}", std::process::id());
        let conn = &mut database.connect();
        // As since PostgreSQL 15, where by default nobody may create anything in `public`.
        conn.batch_execute(&format!(
            "CREATE ROLE {name}; REVOKE CREATE ON SCHEMA public FROM PUBLIC"
        ))
        .unwrap();
        Self {
            url: database.url_with("options", &format!("-c role={name}")),
            database: database.url(),
            name,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The URL of a session of the role.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url).unwrap()
    }

    /// Runs `grants.sql` with psql. Returns false if there is none.
    pub(crate) fn grant(&self) -> bool {
        let output = Command::new("psql")
            .args([
                "--no-psqlrc",
                "--quiet",
                "--file",
                "migrations/grants.sql",
                "--set",
            ])
            .arg(format!("role={}", self.name))
            .arg(&self.database)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output();
        let Ok(output) = output else {
            eprintln!("psql is not installed: grants.sql is not tested");
            return false;
        };
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        true
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&self.database) {
            let name = &self.name;
            let _ = conn.batch_execute(&format!("DROP OWNED BY {name}; DROP ROLE {name}"));
        }
    }
}
