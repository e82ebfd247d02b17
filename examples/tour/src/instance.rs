//! Instances of an application: this program, started again with a role, a name and a URL.

use std::env;
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::PgPool;
use workbench::Database;

/// A process that the tour has started. Dropping kills it.
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts instances, and waits until each is connected. Their sessions have their names.
    pub(crate) fn start(
        role: &str,
        names: impl IntoIterator<Item = String>,
        database: &Database,
        extra: &str,
    ) -> Result<Vec<Self>, Box<dyn Error>> {
        let mut all = Vec::new();
        for name in names {
            let url = database.url_with("application_name", &name);
            let mut process = Command::new(env::current_exe()?)
                .args([role, &name, &url, extra])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let pipes = (process.stdin.take(), process.stdout.take());
            let (Some(input), Some(output)) = pipes else {
                return Err("both are pipes".into());
            };
            all.push(Self {
                name,
                process,
                input,
                output: BufReader::new(output),
            });
        }
        for started in &mut all {
            assert_eq!(started.read_line()?, "ready");
        }
        Ok(all)
    }

    /// Waits for the next line that the process prints.
    pub(crate) fn read_line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line)?;
        assert!(read > 0, "{} has ended", self.name);
        Ok(line.trim_end().to_owned())
    }

    /// Lets the process continue after [`Instance::wait`].
    pub(crate) fn go_on(&mut self) -> io::Result<()> {
        self.input.write_all(b"\n")
    }

    /// Waits for the end of the process, which must succeed.
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
    pub(crate) extra: String,
}

impl Instance {
    pub(crate) fn this() -> Option<Self> {
        let mut arguments = env::args().skip(1);
        Some(Self {
            role: arguments.next()?,
            name: arguments.next()?,
            url: arguments.next()?,
            extra: arguments.next()?,
        })
    }

    /// Opens a pool of one connection, and waits for the other instances.
    pub(crate) fn pool(&self) -> Result<PgPool, Box<dyn Error>> {
        let pool = Pool::builder()
            .max_size(1)
            .build(ConnectionManager::new(&self.url))?;
        println!("ready");
        self.wait()?;
        Ok(pool)
    }

    /// Waits until the tour lets this process continue. Fails if the tour has ended.
    pub(crate) fn wait(&self) -> io::Result<()> {
        match io::stdin().read_line(&mut String::new())? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}
