//! Instances of an application: processes of their own, which run a part of the tour.

use std::env;
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::PgPool;
use workbench::Database;

const ROLE: &str = "TOUR_ROLE";
const NAME: &str = "TOUR_NAME";
const DATABASE: &str = "TOUR_DATABASE";

/// What the first line may be that an instance says.
pub(crate) const READY: &str = "ready";

/// A process that was started, as the tour sees it. Killed when the value drops.
pub(crate) struct Process {
    pub(crate) name: String,
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts an instance that plays a role, and waits until it is ready. Its sessions have its name.
    pub(crate) fn start(role: &str, name: &str, database: &Database) -> io::Result<Self> {
        let mut started = Self::launch(role, name, database, &[])?;
        started.expect(READY);
        Ok(started)
    }

    /// Starts an instance with variables of its own, and does not wait for it.
    pub(crate) fn launch(
        role: &str,
        name: &str,
        database: &Database,
        variables: &[(&str, &str)],
    ) -> io::Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .env(ROLE, role)
            .env(NAME, name)
            .env(DATABASE, database.url_with("application_name", name))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        Ok(Self {
            name: name.to_owned(),
            process,
            input: input.expect("it is a pipe"),
            output: BufReader::new(output.expect("it is a pipe")),
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The next line that it says.
    pub(crate) fn said(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            panic!("{} has ended", self.name);
        }
        Ok(line.trim_end().to_owned())
    }

    pub(crate) fn expect(&mut self, line: &str) {
        let said = self.said().expect("its output can be read");
        assert_eq!(said, line, "{}", self.name);
    }

    /// Lets it go on from [`Instance::wait`].
    pub(crate) fn go_on(&mut self) -> io::Result<()> {
        self.input.write_all(b"\n")
    }

    /// Sends it the signal that no process survives or hears of: `kill -9`.
    pub(crate) fn kill(mut self) -> io::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Waits until it has ended, which must be well.
    pub(crate) fn end(mut self) -> io::Result<()> {
        let status = self.process.wait()?;
        assert!(status.success(), "{}: {status}", self.name);
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// This process, if it is an instance.
pub(crate) struct Instance {
    pub(crate) role: String,
    pub(crate) name: String,
    url: String,
}

impl Instance {
    pub(crate) fn this() -> Option<Self> {
        Some(Self {
            role: env::var(ROLE).ok()?,
            name: env::var(NAME).ok()?,
            url: env::var(DATABASE).ok()?,
        })
    }

    pub(crate) fn connect(&self) -> ConnectionResult<PgConnection> {
        PgConnection::establish(&self.url)
    }

    /// A pool of one connection, which is open.
    pub(crate) fn pool(&self) -> Result<PgPool, Box<dyn Error>> {
        Ok(Pool::builder()
            .max_size(1)
            .build(ConnectionManager::new(&self.url))?)
    }

    /// Says a line to the tour.
    pub(crate) fn say(&self, line: &str) -> io::Result<()> {
        let mut output = io::stdout();
        writeln!(output, "{line}")?;
        output.flush()
    }

    /// Waits until the tour lets it go on; an error if that has ended.
    pub(crate) fn wait(&self) -> io::Result<()> {
        match io::stdin().read_line(&mut String::new())? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}
