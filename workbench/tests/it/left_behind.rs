//! Nothing is left behind, however a process ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use workbench::{Cluster, StopMode};

use crate::child::{Child, is_empty, say, signal, wait};
use crate::poll;

static CLUSTER: OnceLock<Cluster> = OnceLock::new();

fn serve() -> &'static Cluster {
    let cluster = CLUSTER.get_or_init(Cluster::start);
    say(cluster.socket_directory().display());
    cluster
}

pub(crate) fn serve_and_wait() {
    serve();
    wait();
}

pub(crate) fn serve_and_panic() {
    let _local = Cluster::start();
    serve();
    wait();
    panic!("as asked");
}

pub(crate) fn serve_and_abort() {
    serve();
    wait();
    std::process::abort();
}

// Nobody waits for the other child: it survives this process.
#[allow(clippy::zombie_processes)]
pub(crate) fn serve_beside_another_child() {
    serve();
    let other = Command::new("/bin/sleep").arg("600").spawn().unwrap();
    say(other.id());
    wait();
}

pub(crate) fn restart_again_and_again() {
    let cluster = serve();
    wait();
    loop {
        cluster.restart(StopMode::Immediate);
        say("restarted");
    }
}

pub(crate) fn serve_twice_and_wait() {
    let _standby = serve().standby();
    say("standby");
    wait();
}

/// The number of the process that runs in the directory of a server.
fn process(directory: &Path) -> Option<String> {
    let pid = fs::read_to_string(directory.join("pid"))
        .ok()?
        .trim()
        .to_owned();
    (!pid.is_empty()).then_some(pid)
}

/// Waits until a server and all that belongs to it has gone.
#[track_caller]
fn gone(child: &Child, processes: &[String]) {
    poll::until("the directory has gone", || is_empty(child.temporary()));
    for process in processes {
        poll::until("the server has gone", || !signal("0", process));
    }
}

/// A server that runs in another process.
fn serving(part: &str) -> (Child, PathBuf, String) {
    let mut child = Child::start(part, &[]);
    let directory = PathBuf::from(child.said());
    let process = process(&directory).unwrap();
    assert!(signal("0", &process));
    assert!(directory.starts_with(child.temporary()));
    (child, directory, process)
}

#[test]
fn after_an_ordinary_end() {
    let (mut child, _, process) = serving("serve and wait");
    child.go_on();
    assert!(child.end().0.success());
    gone(&child, &[process]);
}

#[test]
fn after_a_panic() {
    let (mut child, _, process) = serving("serve and panic");
    child.go_on();
    assert!(!child.end().0.success());
    gone(&child, &[process]);
}

#[test]
fn after_an_abort() {
    let (mut child, _, process) = serving("serve and abort");
    child.go_on();
    assert!(!child.end().0.success());
    gone(&child, &[process]);
}

#[test]
fn after_a_kill() {
    let (mut child, _, process) = serving("serve and wait");
    child.kill();
    gone(&child, &[process]);
}

#[test]
fn after_an_interrupt() {
    let (mut child, _, process) = serving("serve and wait");
    child.interrupt();
    gone(&child, &[process]);
}

#[test]
fn after_a_kill_that_another_child_survives() {
    let (mut child, _, process) = serving("serve beside another child");
    let other = child.said();
    child.kill();
    gone(&child, &[process]);
    assert!(signal("KILL", &other), "the other child was not there");
}

#[test]
fn after_a_kill_with_a_suspended_server() {
    let (mut child, _, process) = serving("serve and wait");
    assert!(signal("STOP", &process));
    child.kill();
    gone(&child, &[process]);
}

#[test]
fn after_a_kill_with_a_standby() {
    let (mut child, directory, primary) = serving("serve twice and wait");
    child.said();
    let entries = fs::read_dir(child.temporary())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let standby = process(&entries.into_iter().find(|path| *path != directory).unwrap()).unwrap();
    assert_ne!(primary, standby);
    child.kill();
    gone(&child, &[primary, standby]);
}

#[test]
fn after_kills_while_the_server_is_set_up() {
    // The last file that is there when the process is killed, from before `initdb` to the start of
    // the server.
    for file in [
        "",
        "setup",
        "data/PG_VERSION",
        "data/base/1",
        "data/base/5",
        "log",
        "data/postmaster.pid",
    ] {
        let mut child = Child::start("serve and wait", &[]);
        let mut processes = Vec::new();
        poll::until("the server is being set up", || {
            fs::read_dir(child.temporary()).unwrap().any(|entry| {
                let directory = entry.unwrap().path();
                let there = directory.join(file).exists();
                processes = process(&directory).into_iter().collect();
                there
            })
        });
        child.kill();
        gone(&child, &processes);
    }
}

#[test]
fn after_kills_while_the_server_restarts() {
    for restarts in 0..4 {
        let (mut child, directory, _) = serving("restart again and again");
        child.go_on();
        for _ in 0..restarts {
            child.said();
        }
        if restarts % 2 == 1 {
            // Between the end of one server and the start of the next.
            poll::until("the server has stopped", || {
                !directory.join("data/postmaster.pid").exists()
            });
        }
        let processes: Vec<_> = process(&directory).into_iter().collect();
        child.kill();
        gone(&child, &processes);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn shared_memory_of_a_server_that_was_killed() {
    let segments = || fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let (mut child, directory, process) = serving("serve and wait");
    let state = fs::read_to_string(directory.join("data/postmaster.pid")).unwrap();
    let segment = state
        .lines()
        .nth(6)
        .and_then(|line| line.split_whitespace().nth(1))
        .unwrap()
        .to_owned();
    let is_there = || {
        segments()
            .lines()
            .any(|line| line.split_whitespace().nth(1) == Some(&segment))
    };
    assert!(is_there());

    assert!(signal("KILL", &process));
    poll::until("the server has gone", || !signal("0", &process));
    child.kill();
    gone(&child, &[process]);
    poll::until("the segment has gone", || !is_there());
}
