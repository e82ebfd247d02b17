//! Nothing is left behind, however a process ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use workbench::Cluster;

use crate::child::{Child, say, signal, wait};
use crate::until;

pub(crate) fn serve_and(then: &str) {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(Cluster::start);
    let _standby = (then == "follow").then(|| cluster.standby());
    say(cluster.directory().display());
    wait();
    match then {
        "panic" => panic!("as asked"),
        "abort" => std::process::abort(),
        _ => {}
    }
}

/// The number of the process that runs in the directory of a server.
fn process(directory: &Path) -> Option<String> {
    let pid = fs::read_to_string(directory.join("pid")).ok()?;
    Some(pid.trim().to_owned()).filter(|pid| !pid.is_empty())
}

/// Starts a server in a child process.
fn start_server(then: &str) -> (Child, PathBuf, String) {
    let mut child = Child::start(then, "");
    let directory = PathBuf::from(child.read());
    let process = process(&directory).unwrap();
    (child, directory, process)
}

/// Asserts that a server and everything that belongs to it goes away.
#[track_caller]
fn assert_gone(child: &Child, processes: &[String]) {
    until("the directory has gone", || child.left_nothing());
    for process in processes {
        until("the server has gone", || !signal("0", process));
    }
}

#[test]
fn a_process_that_ends_in_any_way_leaves_nothing_behind() {
    for then in ["return", "panic", "abort", "be killed", "be interrupted"] {
        let (mut child, _, process) = start_server(then);
        match then {
            "be killed" => child.send("KILL"),
            "be interrupted" => child.send("INT"),
            _ => child.go_on(),
        }
        assert_eq!(child.succeeds(), then == "return", "{then}");
        assert_gone(&child, &[process]);
    }
}

#[test]
fn a_suspended_server_and_its_standby_go_away_too() {
    let (child, _, primary) = start_server("follow");
    let directories = fs::read_dir(&child.temporary).unwrap();
    let processes: Vec<_> = directories
        .map(|entry| process(&entry.unwrap().path()).unwrap())
        .collect();
    assert!(processes.len() == 2 && processes.contains(&primary));
    assert!(signal("STOP", &primary));
    child.send("KILL");
    assert_gone(&child, &processes);
}

#[test]
fn kills_while_the_server_is_set_up_leave_nothing_behind() {
    // The last file that is there when the process is killed, from before `initdb` to the start of
    // the server.
    for file in ["", "setup", "data/base/1", "log", "data/postmaster.pid"] {
        let child = Child::start("wait", "");
        let mut processes = Vec::new();
        until("the server is being set up", || {
            let mut directories = fs::read_dir(&child.temporary).unwrap();
            directories.any(|entry| {
                let directory = entry.unwrap().path();
                let is_there = directory.join(file).exists();
                processes = process(&directory).into_iter().collect();
                is_there
            })
        });
        child.send("KILL");
        assert_gone(&child, &processes);
    }
}
