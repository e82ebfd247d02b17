//! Real Python and Node.js programs on the same database: they exclude our guards, and our guards
//! exclude them.
//!
//! `scripts/test_with languages` runs it, with the packages that the programs in `tests/interop/` need.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use diesel_interlock::{
    AdvisoryLock, Attempt, Error, LockId, LockKey, PgPool, sync, throttled_resources,
};
use workbench::Database;

const NAMES: [&str; 8] = [
    "nightly report",
    "Größenänderung",
    "lock 🔒",
    "a",
    "223 345",
    "job 4008307722",
    "polygenelubricants",
    " back\\slash 'quoted' %s $1 ",
];

/// How long a program may take to start, connect and reply.
const REPLYING: Duration = Duration::from_secs(60);

/// How long the server may take to notice that a program is gone.
const NOTICING: Duration = Duration::from_secs(30);

/// How a program makes a number of a name, and the language that it is written in.
#[derive(Debug, Clone, Copy)]
enum Hash {
    PythonFnv,
    PythonCrc32,
    DjangoPglocks2,
    DjangoPglock,
    NodeTimes31,
}

impl Hash {
    const ALL: [Self; 5] = [
        Self::PythonFnv,
        Self::PythonCrc32,
        Self::DjangoPglocks2,
        Self::DjangoPglock,
        Self::NodeTimes31,
    ];

    /// Our lock of the same name.
    fn lock(self, name: &'static str) -> AdvisoryLock {
        AdvisoryLock::new(match self {
            Self::PythonFnv => LockKey::named(name),
            Self::PythonCrc32 => LockKey::crc32(name),
            Self::DjangoPglocks2 => LockKey::django_pglocks_2(name),
            Self::DjangoPglock => LockKey::django_pglock(name),
            Self::NodeTimes31 => LockKey::times31(name),
        })
    }

    /// The program, up to its connection string.
    fn program(self) -> (Command, &'static str) {
        let programs = programs();
        let python = || {
            let mut command = Command::new(required("INTEROP_PYTHON"));
            // The name is UTF-8, whatever the locale is.
            command.args(["-X", "utf8"]).arg(programs.join("client.py"));
            command
        };
        match self {
            Self::PythonFnv => (python(), "fnv"),
            Self::PythonCrc32 => (python(), "crc32"),
            Self::DjangoPglocks2 => (python(), "django_pglocks_2"),
            Self::DjangoPglock => (python(), "django_pglock"),
            Self::NodeTimes31 => {
                let mut command = Command::new("node");
                command
                    .env("NODE_PATH", required("INTEROP_NODE_MODULES"))
                    .arg(programs.join("client.mjs"));
                (command, "times31")
            }
        }
    }
}

fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop")
}

/// The value of an environment variable that `scripts/test_with languages` sets.
fn required(variable: &str) -> String {
    env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: run scripts/test_with languages, which installs what this test needs")
    })
}

/// A program with a session of its own; killed with the value.
struct Client {
    child: Child,
    commands: Option<ChildStdin>,
    replies: Receiver<String>,
}

impl Client {
    fn start(database: &Database, hash: Hash, name: &str) -> Self {
        let (mut command, mode) = hash.program();
        let mut child = command
            .args([&database.url(), mode, name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let commands = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self {
            child,
            commands,
            replies,
        }
    }

    /// The program's reply to a command.
    #[track_caller]
    fn ask(&mut self, command: &str) -> String {
        let commands = self.commands.as_mut().unwrap();
        // A program that has ended is noticed when it does not reply.
        let _ = writeln!(commands, "{command}");
        self.replies
            .recv_timeout(REPLYING)
            .unwrap_or_else(|error| panic!("no reply to `{command}`: {error}"))
    }

    /// Ends the program's input, and waits for its end.
    #[track_caller]
    fn end(mut self) {
        self.commands = None;
        assert_eq!(
            self.replies.recv_timeout(REPLYING),
            Err(mpsc::RecvTimeoutError::Disconnected)
        );
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn exclude_each_other(hash: Hash) {
    let database = Database::new();
    let pool = database.pool(1);
    for name in NAMES {
        let lock = hash.lock(name);
        let mut client = Client::start(&database, hash, name);

        assert_eq!(client.ask("try"), "granted", "{lock:?}");
        assert!(lock.try_acquire(&pool).unwrap().is_busy(), "{lock:?}");
        assert_eq!(client.ask("unlock"), "unlocked", "{lock:?}");

        let Attempt::Acquired(mut guard) = lock.try_acquire(&pool).unwrap() else {
            panic!("{lock:?} is taken, though the program unlocked it");
        };
        assert_eq!(client.ask("try"), "busy", "{lock:?}");
        assert_eq!(client.ask("unlock"), "not held", "{lock:?}");
        assert!(guard.is_held().unwrap(), "{lock:?}");
        guard.release().unwrap();

        assert_eq!(client.ask("try"), "granted", "{lock:?}");
        assert!(lock.try_acquire(&pool).unwrap().is_busy(), "{lock:?}");
        client.end();
        assert_acquired_soon(&lock, &pool);
    }
}

/// The server frees the lock within moments after the program is gone.
#[track_caller]
fn assert_acquired_soon(lock: &AdvisoryLock, pool: &PgPool) {
    let Attempt::Acquired(guard) = lock.acquire_timeout(pool, NOTICING).unwrap() else {
        panic!("{lock:?} is still taken after {NOTICING:?}");
    };
    guard.release().unwrap();
}

#[test]
fn python_with_fnv_and_our_guards_exclude_each_other() {
    exclude_each_other(Hash::PythonFnv);
}

#[test]
fn python_with_crc32_and_our_guards_exclude_each_other() {
    exclude_each_other(Hash::PythonCrc32);
}

#[test]
fn django_pglocks_2_and_our_guards_exclude_each_other() {
    exclude_each_other(Hash::DjangoPglocks2);
}

#[test]
fn django_pglock_and_our_guards_exclude_each_other() {
    exclude_each_other(Hash::DjangoPglock);
}

#[test]
fn node_with_the_knex_articles_hash_and_our_guards_exclude_each_other() {
    exclude_each_other(Hash::NodeTimes31);
}

/// The key that a program has locked with the code of `docs/interop.md`, after it has tried all that the
/// page says.
#[track_caller]
fn try_the_page(mut command: Command) -> LockKey {
    throttled_resources! {
        enum Resource { TenantImport = "tenant import" every Duration::from_secs(3600) }
    }
    let database = Database::new();
    let conn = &mut database.connect();
    diesel_interlock::migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/interop.md");
    let done = command.arg(database.url()).arg(page).output().unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let key = String::from_utf8(done.stdout).unwrap();
    LockKey::bigint(key.trim().parse().unwrap())
}

#[test]
fn the_python_of_the_page_does_what_the_page_says() {
    let mut command = Command::new(required("INTEROP_PYTHON"));
    command.args(["-X", "utf8", "-W", "ignore"]);
    command.arg(programs().join("page.py"));
    assert_eq!(try_the_page(command), LockKey::named("nightly report"));
}

#[test]
fn the_javascript_of_the_page_does_what_the_page_says() {
    let mut command = Command::new("node");
    command
        .env("NODE_PATH", required("INTEROP_NODE_MODULES"))
        .arg(programs().join("page.mjs"));
    assert_eq!(try_the_page(command), LockKey::named("nightly report"));
}

#[test]
fn a_killed_program_frees_the_lock() {
    let database = Database::new();
    let pool = database.pool(1);
    for hash in Hash::ALL {
        let lock = hash.lock(NAMES[0]);
        let mut client = Client::start(&database, hash, NAMES[0]);
        assert_eq!(client.ask("try"), "granted", "{lock:?}");
        assert!(lock.try_acquire(&pool).unwrap().is_busy(), "{lock:?}");

        client.child.kill().unwrap();
        assert_acquired_soon(&lock, &pool);
    }
}

#[test]
fn a_program_and_our_transaction_exclude_each_other() {
    let database = Database::new();
    let conn = &mut database.connect();
    let hash = Hash::PythonFnv;
    let lock = hash.lock(NAMES[0]);
    let mut client = Client::start(&database, hash, NAMES[0]);

    lock.transaction(conn, |_| {
        assert_eq!(client.ask("try"), "busy");
        Ok::<_, Error>(())
    })
    .unwrap();

    assert_eq!(client.ask("try"), "granted");
    let attempt = lock.try_transaction(conn, |_| Ok::<_, Error>(())).unwrap();
    assert!(attempt.is_busy());

    assert_eq!(client.ask("unlock"), "unlocked");
    let attempt = lock.try_transaction(conn, |_| Ok::<_, Error>(())).unwrap();
    assert_eq!(attempt, Attempt::Acquired(()));
    client.end();
}

#[test]
fn the_names_have_numbers_on_both_sides_of_where_signs_go_wrong() {
    for hash in Hash::ALL {
        let middle = match hash {
            Hash::PythonCrc32 => 1 << 31,
            _ => 0,
        };
        let is_low = NAMES.map(|name| match hash.lock(name).key().id() {
            Ok(LockId::BigInt(number)) => number < middle,
            other => panic!("{name:?} has {other:?}"),
        });
        assert!(is_low.contains(&true), "{hash:?}");
        assert!(is_low.contains(&false), "{hash:?}");
    }
}
