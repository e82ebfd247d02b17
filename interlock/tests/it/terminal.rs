//! `interlock run` in a terminal, which `script` of util-linux makes.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use workbench::Database;

use crate::support::{Session, with_default_signals};

/// A command in a terminal. The test types keys and reads the screen.
struct Terminal {
    script: Child,
    keys: ChildStdin,
    pieces: Receiver<Vec<u8>>,
    screen: String,
}

impl Terminal {
    /// None where there is no `script`.
    fn start(database: &Database, command: &str) -> Option<Self> {
        let directory = std::path::Path::new(env!("CARGO_BIN_EXE_interlock"))
            .parent()
            .unwrap();
        if Command::new("script").arg("--version").output().is_err() {
            eprintln!("no `script` of util-linux here: not tried");
            return None;
        }
        let mut script = with_default_signals("script")
            .args([
                "--quiet",
                "--flush",
                "--return",
                "--command",
                command,
                "/dev/null",
            ])
            // After Ctrl-C another shell may return its own status instead of the command's.
            .env("SHELL", "/bin/bash")
            .env("DATABASE_URL", database.url())
            .env("PATH", format!("{}:/usr/bin:/bin", directory.display()))
            .env("TERM", "dumb")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, pieces) = channel();
        let mut output = script.stdout.take().unwrap();
        thread::spawn(move || {
            let mut piece = [0; 1024];
            while let Ok(read @ 1..) = output.read(&mut piece) {
                let _ = sender.send(piece[..read].to_vec());
            }
        });
        Some(Self {
            keys: script.stdin.take().unwrap(),
            script,
            pieces,
            screen: String::new(),
        })
    }

    fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Reads until a text appears after what was read before, for a minute.
    fn shows(&mut self, text: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(at) = self.screen.find(text) {
                self.screen.drain(..at + text.len());
                return;
            }
            let rest = end.saturating_duration_since(Instant::now());
            let piece = self.pieces.recv_timeout(rest);
            let piece = piece.unwrap_or_else(|_| panic!("{text:?} is not in {:?}", self.screen));
            self.screen += &String::from_utf8_lossy(&piece);
        }
    }

    fn status(&mut self) -> Option<i32> {
        let mut status = None;
        crate::support::eventually("the terminal is closed", || {
            status = self.script.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// The terminal echoes what is typed, so the texts that the command prints must not occur in the
/// typed line.
const READS: &str = r#"sh -c 'echo as"k"s; read line; echo "[$line]"; exit 7'"#;

#[test]
fn the_command_reads_what_is_typed() {
    let database = Database::new();
    // A job of one process, a job in a shell, and a command that reads the terminal besides its
    // standard input.
    for line in [
        format!("exec interlock run x -- {READS}"),
        format!("interlock run x -- {READS} 2>/dev/null"),
        format!(
            "true | interlock run x -- {}",
            READS.replace("read line", "read line </dev/tty")
        ),
    ] {
        let Some(mut terminal) = Terminal::start(&database, &line) else {
            return;
        };
        terminal.shows("asks");
        terminal.types("typed\n");
        terminal.shows("[typed]");
        assert_eq!(terminal.status(), Some(7), "{line}");
    }
}

#[test]
fn the_other_process_of_a_pipeline_can_read_the_terminal_too() {
    let database = Database::new();
    let line =
        r#"interlock run x -- echo piped | sh -c 'read line </dev/tty; cat; echo "[$line]"'"#;
    let Some(mut terminal) = Terminal::start(&database, line) else {
        return;
    };
    terminal.types("typed\n");
    terminal.shows("piped");
    terminal.shows("[typed]");
    assert_eq!(terminal.status(), Some(0));
}

#[test]
fn control_c_reaches_the_command_once() {
    let database = Database::new();
    let waits = r#"sh -c 'trap "echo once; n=\$((n+1))" INT; trap "exit 1\$n" TERM; echo waits $$; while :; do sleep 0.05; done'"#;
    for line in [
        format!("exec interlock run x -- {waits}"),
        format!("interlock run x -- {waits} 2>/dev/null"),
    ] {
        let Some(mut terminal) = Terminal::start(&database, &line) else {
            return;
        };
        terminal.shows("waits ");
        terminal.shows("\n");
        terminal.types("\x03");
        terminal.shows("once");
        Session::of(&database).end_holders();
        assert_eq!(terminal.status(), Some(75), "{line}");
        assert!(!terminal.screen.contains("once"), "{:?}", terminal.screen);
    }
}

#[test]
fn control_c_ends_a_command_without_a_handler() {
    let database = Database::new();
    let line = "exec interlock run x -- sh -c 'echo waits; exec sleep 1000'";
    let Some(mut terminal) = Terminal::start(&database, line) else {
        return;
    };
    terminal.shows("waits");
    terminal.types("\x03");
    assert_eq!(terminal.status(), Some(130));
    assert_eq!(Session::of(&database).locks(true), 0);
}

#[test]
fn control_z_stops_the_job_and_fg_goes_on() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let Some(mut terminal) = Terminal::start(&database, "bash --norc --noprofile -i") else {
        return;
    };
    terminal.types("PS1=pro'mpt '\n");
    // The command reads a line first, and so has the terminal. A Ctrl-Z at the moment when it gets
    // the terminal may be lost.
    let reads_twice = READS.replace("read line", "read line; echo as\"k\"s more; read line");
    for rest in ["", " 2>/dev/null"] {
        terminal.shows("prompt ");
        terminal.types(&format!("interlock run x -- {reads_twice}{rest}\n"));
        terminal.shows("asks");
        terminal.types("\n");
        terminal.shows("asks more");
        terminal.types("\x1a");
        terminal.shows("Stopped");
        terminal.shows("prompt ");
        assert_eq!(session.locks(true), 1);
        terminal.types("fg\n");
        terminal.shows("interlock run x");
        terminal.types("typed\n");
        terminal.shows("[typed]");
    }
    // In the background the command stops when it reads, and reads again in the foreground.
    terminal.shows("prompt ");
    terminal.types(&format!("interlock run x -- {READS} &\n"));
    terminal.shows("asks");
    terminal.types("while ! jobs | grep -q Stopped; do sleep 0.1; done; fg\n");
    terminal.shows("interlock run x");
    terminal.types("typed\n");
    terminal.shows("[typed]");
    terminal.shows("prompt ");
    terminal.types("exit 3\n");
    assert_eq!(terminal.status(), Some(3));
}
