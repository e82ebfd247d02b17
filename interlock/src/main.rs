//! `interlock`: runs a command under a lock of PostgreSQL, shows who holds and who waits, ends a
//! holder, and examines a set-up.

mod completions;
mod database;
mod doctor;
mod hold;
mod holders;
mod install;
mod job;
mod kill;
mod pause;
mod ps;
mod refusal;
mod run;

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fmt, io, process, thread};

use clap::error::{ContextKind, ErrorKind};
use clap::{Parser, Subcommand};
use diesel_interlock::Error;

/// Prints a message to standard error.
macro_rules! say {
    ($($what:tt)*) => {
        $crate::say_within_a_second(format!($($what)*))
    };
}
pub(crate) use say;

/// Waits at most a second for standard error, because neither a full disk nor a paused terminal may
/// delay the release of a lock or the end of a command.
fn say_within_a_second(what: String) {
    let lines: Vec<_> = what.lines().map(ps::plain).collect();
    let what = lines.join("\n");
    let (written, is_written) = mpsc::channel();
    let _ = thread::Builder::new().spawn(move || {
        let _ = writeln!(io::stderr(), "interlock: {what}");
        let _ = written.send(());
    });
    let _ = is_written.recv_timeout(Duration::from_secs(1));
}

const STATUSES: &str = "\
The environment variable DATABASE_URL says which database to use: a URL, or keywords and values
of libpq. Without it, the variables of libpq do: PGHOST, PGPORT, PGDATABASE, PGUSER, PGSERVICE, ...
postgres:// alone stands for libpq's defaults.

Exit status (`run` otherwise returns the status of the command):
  0        done; `doctor`: no check has failed
  1        `kill`: nothing was ended, or a holder is left; `doctor`: a check has failed or, with
           --strict, has given a warning
  2        the arguments are wrong
  69       the database cannot be reached, or does not reply
  71       the operating system has refused a request, such as to start a process
  73       `run`, `install`: another session holds the lock (-E sets another status for `run`)
  74       the output cannot be written
  75       `run`: the lock was lost while the command ran
  78       the set-up is wrong: DATABASE_URL, the password, the schema, the rights of the role;
           `run`: the connection goes through a pooler in transaction mode
  126 127  `run`: the command cannot be executed, or was not found
  128 + N  `run`: signal N has ended the command, or the wait for the lock";

/// Locks, slots, leaders and schedules of PostgreSQL, from a shell
#[derive(Debug, Parser)]
#[command(name = "interlock", version, after_help = STATUSES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a command under a lock, and does not run it if the lock is busy
    #[command(after_help = STATUSES)]
    Run(run::Run),
    /// Shows advisory locks with their holders and waiters, slots in use, leaders and schedules
    Ps(ps::Ps),
    /// Shows the holder of a lock, a slot, a leader's term or a schedule's run, asks for
    /// confirmation, and ends that holder unless it has changed meanwhile
    Kill(kill::Kill),
    /// Pauses a schedule, on all instances and over restarts, until it is resumed
    Pause(pause::Pause),
    /// Resumes a schedule that was paused
    Resume(pause::Pause),
    /// Runs a schedule now, once, also while it is paused
    Trigger(pause::Pause),
    /// Examines the server, the schema, the rights and the settings, and says what to do
    Doctor(doctor::Doctor),
    /// Creates the schema `resource_control`, or what is missing in it
    Install(install::Install),
    /// Writes completions for a shell to standard output
    Completions(completions::Completions),
    /// Writes the manual page to standard output
    Man,
}

fn main() {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == job::EXEC) {
        process::exit(job::exec(arguments));
    }
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        if error.kind() == ErrorKind::DisplayVersion {
            let tls = if database::has_tls() {
                "with"
            } else {
                "without"
            };
            let _ = writeln!(
                io::stdout(),
                "interlock {}, {tls} TLS",
                env!("CARGO_PKG_VERSION")
            );
            process::exit(0);
        }
        // Clap suggests to put an unknown option after `--`, where `run` would take the option for
        // the command.
        let mut error = error;
        error.remove(ContextKind::Suggested);
        error.exit()
    });
    let status = match arguments.command {
        Command::Run(run) => run.run(),
        Command::Ps(ps) => ps.run(),
        Command::Kill(kill) => kill.run(),
        Command::Pause(pause) => pause.run(pause::Change::Pause),
        Command::Resume(pause) => pause.run(pause::Change::Resume),
        Command::Trigger(pause) => pause.run(pause::Change::Trigger),
        Command::Doctor(doctor) => doctor.run(),
        Command::Install(install) => install.run(),
        Command::Completions(completions) => completions.run(),
        Command::Man => completions::man(),
    };
    process::exit(status.unwrap_or_else(|failure| {
        match failure.remedy {
            Some(command) => say!("{failure}; see `{command}`"),
            None if failure.message.is_empty() => {}
            None => say!("{failure}"),
        }
        failure.status
    }));
}

/// Why a command has failed, and the exit status that says so.
#[derive(Debug)]
struct Failure {
    status: i32,
    message: String,
    /// The command that finds a remedy, where the message has none.
    remedy: Option<&'static str>,
}

impl Failure {
    const INPUT: i32 = 2;
    const UNAVAILABLE: i32 = 69;
    const SYSTEM: i32 = 71;
    const BUSY: i32 = run::BUSY as i32;
    const OUTPUT: i32 = 74;
    const LOST: i32 = 75;
    const SET_UP: i32 = 78;

    fn new(status: i32, message: impl fmt::Display) -> Self {
        Self {
            status,
            message: message.to_string(),
            remedy: None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message.trim_end())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Input(_) => Self::INPUT,
            // The text of this error speaks of guards, which mean nothing to a user of the shell.
            Error::Pool(cause) => return Self::new(Self::UNAVAILABLE, unreachable(&cause)),
            _ if error.is_unavailable() => Self::UNAVAILABLE,
            Error::LockLost(_) | Error::PermitLost(_) | Error::SessionMoved { .. } => Self::LOST,
            _ => Self::SET_UP,
        };
        let mut message = error.to_string();
        if let Error::ReleaseFailed { source, .. } = &error {
            message += &format!(": {source}");
        }
        if matches!(error, Error::NotExclusive(_)) {
            message += "; `interlock run --lease` works there";
        }
        let message = message.replace("`migrations::install`", "`interlock install`");
        // A right is missing, or another session has locked the table.
        let is_refused = status == Self::SET_UP && matches!(error, Error::Database(_));
        Self {
            remedy: is_refused.then_some("interlock doctor --needs-schema"),
            ..Self::new(status, message)
        }
    }
}

fn unreachable(cause: &dyn fmt::Display) -> String {
    let is_set = env::var("DATABASE_URL").is_ok_and(|url| !url.trim().is_empty());
    let of = if is_set { " of DATABASE_URL" } else { "" };
    format!("the database{of} cannot be reached: {cause}")
}

impl From<diesel::result::Error> for Failure {
    fn from(error: diesel::result::Error) -> Self {
        Error::from(error).into()
    }
}

/// Only writes to standard output get here. A closed pipe needs no message.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let message = match error.kind() {
            io::ErrorKind::BrokenPipe => String::new(),
            _ => format!("the output cannot be written: {error}"),
        };
        Self::new(Self::OUTPUT, message)
    }
}

/// The longest duration that is accepted. PostgreSQL can subtract it from the present time.
const LONGEST: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

/// Parses a duration such as `500ms`, `30s`, `10m`, `1h` or `2d`. A number alone is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let milliseconds = match unit {
        "ms" => Some(1),
        "" | "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        "d" => Some(86_400_000),
        _ => None,
    };
    let number = number.parse::<u64>().ok();
    number
        .zip(milliseconds)
        .and_then(|(number, unit)| number.checked_mul(unit))
        .map(Duration::from_millis)
        .filter(|duration| *duration <= LONGEST)
        .ok_or_else(|| {
            "a duration is like 500ms, 30s, 10m, 1h or 2d, and 1,000 years at most".into()
        })
}
