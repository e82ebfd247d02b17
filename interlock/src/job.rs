//! The process of the command. It has its own process group, is killed when this process dies, and
//! gets the terminal when it needs the terminal.
//!
//! **`interlock` starts itself again as `interlock __exec` to set the parent-death signal.** The
//! signal must be set between fork and exec, and without `unsafe` only a separate program can run
//! code there. The kernel sends the signal when the thread that spawned the child ends, not when
//! the process does, so the main thread spawns the child: see the warning in
//! <https://man7.org/linux/man-pages/man2/prctl.2.html>.
//!
//! **Signals are blocked and taken from a queue**, so a signal that was ignored, as under `nohup`,
//! stays ignored for the command.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::mem;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{self, SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpgid, getpgrp, getpid, getppid, tcgetpgrp, tcsetpgrp};

use crate::say;

/// The hidden subcommand by which this program becomes the command.
pub(crate) const EXEC: &str = "__exec";

/// The signals that are forwarded to the command.
pub(crate) const FORWARDED: [Signal; 6] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// Blocks the signals that this process takes from a queue: the forwarded ones and that of Ctrl-Z.
/// All threads that begin later block them, too.
pub(crate) fn block() -> nix::Result<SigSet> {
    let taken: SigSet = FORWARDED.into_iter().chain([Signal::SIGTSTP]).collect();
    let mut blocked = taken;
    // Otherwise a process in the background that takes the terminal back is stopped.
    blocked.add(Signal::SIGTTOU);
    blocked.thread_block()?;
    Ok(taken)
}

/// Becomes the command. `interlock` starts `interlock __exec PID-OF-PARENT COMMAND…`, because only
/// the child itself can ask for a signal at its parent's death, after the fork and before the
/// command. Returns the exit status if the command cannot be executed.
pub(crate) fn exec(mut arguments: impl Iterator<Item = OsString>) -> i32 {
    let (parent, program) = (arguments.next(), arguments.next().unwrap_or_default());
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    if parent.as_deref() != Some(OsStr::new(&getppid().to_string())) {
        return 128 + Signal::SIGKILL as i32; // the parent died before the call above
    }
    let _ = SigSet::all().thread_unblock();
    let error = Command::new(&program).args(arguments).exec();
    say!("{} cannot be run: {error}", program.to_string_lossy());
    match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    }
}

/// The running command.
#[derive(Debug)]
pub(crate) struct Job {
    /// The process, which leads the process group of the same number.
    pub(crate) pid: Pid,
    terminal: Option<File>,
    /// Whether the group has the terminal.
    is_lent: bool,
    /// Whether SIGTSTP was sent to the command, and has not been handled yet.
    is_to_stop: bool,
}

impl Job {
    /// Starts the command. Must be called on the main thread, because Linux ends the command when
    /// the thread that started it ends, not when the process does.
    pub(crate) fn start(words: &[OsString], token: Option<i64>) -> io::Result<Self> {
        let this = if cfg!(target_os = "linux") {
            "/proc/self/exe".into() // works also if an upgrade has replaced the file meanwhile
        } else {
            std::env::current_exe()?
        };
        let mut command = Command::new(this);
        command.arg0("interlock").arg(EXEC);
        command.arg(getpid().to_string()).args(words);
        command.env_remove("INTERLOCK_TOKEN").process_group(0);
        command.envs(token.map(|token| ("INTERLOCK_TOKEN", token.to_string())));
        let mut job = Self {
            pid: Pid::from_raw(command.spawn()?.id() as i32),
            terminal: OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/tty")
                .ok(),
            is_lent: false,
            is_to_stop: false,
        };
        // In a pipeline or a script, other processes need the terminal, too, so the command gets it
        // only when it first asks.
        let is_alone = io::stdin().is_terminal()
            && io::stdout().is_terminal()
            && io::stderr().is_terminal()
            && getpgrp() == getpid();
        if is_alone && job.is_foreground() {
            job.lend();
        }
        Ok(job)
    }

    /// Waits until the process has stopped or ended.
    pub(crate) fn wait(pid: Pid) -> nix::Result<WaitStatus> {
        loop {
            match waitpid(pid, Some(WaitPidFlag::WUNTRACED)) {
                Err(Errno::EINTR) => {}
                status => return status,
            }
        }
    }

    /// Sends a signal to the group, and to the command itself if it has moved to another group. A
    /// stopped command is continued, so that it can end. Must be called before the command is
    /// reaped, because its pid may belong to another process afterwards.
    pub(crate) fn send(&mut self, signal: Signal) {
        self.is_to_stop |= signal == Signal::SIGTSTP;
        let _ = signal::killpg(self.pid, signal);
        if getpgid(Some(self.pid)) != Ok(self.pid) {
            let _ = signal::kill(self.pid, signal);
        }
        if matches!(signal, Signal::SIGTERM | Signal::SIGHUP) {
            let _ = signal::killpg(self.pid, Signal::SIGCONT);
        }
    }

    /// Whether any process is left in the group.
    pub(crate) fn is_there(&self) -> bool {
        signal::killpg(self.pid, None).is_ok()
    }

    /// Kills the processes that are left in the group after the command has ended.
    pub(crate) fn end_group(&self) {
        let _ = signal::killpg(self.pid, Signal::SIGKILL);
    }

    /// Handles a command that has stopped, by Ctrl-Z or because it has asked for the terminal. A
    /// shell sees both processes as one job, so this process stops, too, until the shell continues
    /// it. A command that somebody else has stopped is left alone.
    pub(crate) fn stopped(&mut self, by: Signal) {
        let is_to_stop = mem::take(&mut self.is_to_stop) || by == Signal::SIGTSTP;
        let asks = !is_to_stop && matches!(by, Signal::SIGTTIN | Signal::SIGTTOU);
        if asks && self.is_foreground() {
            self.lend();
        } else if self.terminal.is_some() && (asks || is_to_stop) {
            let was_lent = self.is_lent;
            self.take_back();
            stop();
            if !self.is_foreground() {
                // Without a shell that could stop this process, the command asks again at once:
                // the pause keeps this from being a busy loop.
                thread::sleep(Duration::from_millis(100));
            } else if was_lent {
                self.lend();
            }
            self.send(Signal::SIGCONT);
        }
    }

    /// Whether this process has the terminal, and so may give it to the command.
    fn is_foreground(&self) -> bool {
        self.terminal
            .as_ref()
            .is_some_and(|terminal| tcgetpgrp(terminal) == Ok(getpgrp()))
    }

    /// Gives the terminal to the command, and continues the command, which was stopped if it had
    /// asked for the terminal before.
    fn lend(&mut self) {
        if let Some(terminal) = &self.terminal {
            self.is_lent = tcsetpgrp(terminal, self.pid).is_ok();
        }
        self.send(Signal::SIGCONT);
    }

    fn take_back(&mut self) {
        if let (true, Some(terminal)) = (self.is_lent, &self.terminal) {
            let _ = tcsetpgrp(terminal, getpgrp());
        }
        self.is_lent = false;
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// Stops this process as Ctrl-Z does. The kernel ignores this in an orphaned process group, which
/// no shell could continue.
pub(crate) fn stop() {
    let stop = SigSet::from(Signal::SIGTSTP);
    let _ = stop.thread_unblock();
    let _ = signal::raise(Signal::SIGTSTP);
    let _ = stop.thread_block();
}

/// Whether the signal was ignored when this process began, as SIGHUP is under `nohup`.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal as i32 - 1) & 1 == 1
}
