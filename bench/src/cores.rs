//! One core for a client and its server, where one of them always waits for the other.
//!
//! On two cores, what such a pair takes is mostly what the kernel and the hypervisor take to wake a core that has
//! nothing to do: several times what is to be measured, and another time each time.

use std::collections::HashMap;
use std::fs;
use std::process::Command;
use std::sync::OnceLock;

/// How many cores there are for a measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cores {
    One,
    All,
}

/// Gives them to this process and all below it.
pub(crate) fn assign(cores: Cores) {
    static ALL: OnceLock<String> = OnceLock::new();
    let all = ALL.get_or_init(allowed);
    let first = all
        .split([',', '-'])
        .next()
        .expect("a string has a beginning");
    let cores = match cores {
        Cores::One => first,
        Cores::All => all,
    };
    for process in family() {
        // One that has ended meanwhile needs nothing.
        let output = Command::new("taskset")
            .args([
                "--all-tasks",
                "--cpu-list",
                "--pid",
                cores,
                &process.to_string(),
            ])
            .output()
            .expect("taskset, of util-linux, can be started");
        let ended = !fs::exists(format!("/proc/{process}")).unwrap_or(false);
        assert!(
            output.status.success() || ended,
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// The cores that this process may use, as `taskset` lists them.
fn allowed() -> String {
    let status = fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.expect("Linux tells").trim().to_owned()
}

/// This process and all that descend from it.
fn family() -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").expect("this is Linux").flatten() {
        let Some(process) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // After the name, which may hold anything: the state and the parent.
        let parent = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        children
            .entry(parent.unwrap_or(0))
            .or_default()
            .push(process);
    }
    let mut family = vec![std::process::id()];
    let mut at = 0;
    while let Some(process) = family.get(at) {
        family.extend(children.remove(process).unwrap_or_default());
        at += 1;
    }
    family
}
