//! An application's own migrations.

use std::fmt;

use diesel::connection::BoxableConnection;
use diesel::migration::{
    Migration, MigrationMetadata, MigrationName, MigrationSource, MigrationVersion, Result,
};
use diesel::pg::Pg;

/// A list of migrations: the name, which begins with the version, and the step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own(pub(crate) &'static [(&'static str, Step)]);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Sql(&'static str),
    /// Outside a transaction.
    Alone(&'static str),
    Panic,
}

impl MigrationSource<Pg> for Own {
    fn migrations(&self) -> Result<Vec<Box<dyn Migration<Pg>>>> {
        let all = self.0.iter();
        Ok(all
            .map(|&(name, step)| Box::new(One { name, step }) as _)
            .collect())
    }
}

struct One {
    name: &'static str,
    step: Step,
}

impl Migration<Pg> for One {
    fn run(&self, conn: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        match self.step {
            Step::Sql(sql) | Step::Alone(sql) => Ok(conn.batch_execute(sql)?),
            Step::Panic => panic!("a migration panics"),
        }
    }

    fn revert(&self, _: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        Ok(())
    }

    fn metadata(&self) -> &dyn MigrationMetadata {
        self
    }

    fn name(&self) -> &dyn MigrationName {
        self
    }
}

impl MigrationMetadata for One {
    fn run_in_transaction(&self) -> bool {
        !matches!(self.step, Step::Alone(_))
    }
}

impl MigrationName for One {
    fn version(&self) -> MigrationVersion<'_> {
        let (version, _) = self.name.split_once('_').unwrap();
        version.replace('-', "").into()
    }
}

impl fmt::Display for One {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
