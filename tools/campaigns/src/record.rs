//! The records of the processes: a line for each grant, written at once, so that a kill loses none.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since 1970. All processes and the server share this machine's clock.
pub(crate) fn now() -> i64 {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    elapsed.as_micros() as i64
}

/// Writes the record of a process.
pub(crate) struct Recorder(Mutex<File>);

impl Recorder {
    pub(crate) fn new(path: &str) -> std::io::Result<Self> {
        Ok(Self(Mutex::new(
            OpenOptions::new().create(true).append(true).open(path)?,
        )))
    }

    pub(crate) fn write(&self, line: &str) {
        let mut file = self.0.lock().expect("no thread panics while it writes");
        file.write_all(format!("{line}\n").as_bytes())
            .expect("the record can be written");
    }
}

/// A time during which something was held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) from: i64,
    pub(crate) to: i64,
    pub(crate) token: i64,
    pub(crate) end: End,
    /// Whether the process was suspended meanwhile. If so, it may have noticed a loss too late.
    pub(crate) was_stopped: bool,
}

/// How a holding ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The work was done.
    Done,
    /// The work returned an error.
    Failed,
    /// It was given up before the work was done.
    Left,
    /// It was not renewed in time, or somebody else ended it.
    Lost,
    /// Its process was killed.
    Killed,
}

/// The faults injected into the processes, which are identified by the paths of their records.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// When a process was killed.
    pub(crate) killed: HashMap<String, i64>,
    /// From when to when a process was suspended.
    pub(crate) stopped: Vec<(String, i64, i64)>,
    /// From when to when a process, by its number, could not reach the database because of a fault
    /// of its own.
    pub(crate) away: Vec<(usize, i64, i64)>,
}

impl Faults {
    /// Whether the process was killed within a second after `to`.
    fn was_killed(&self, file: &str, to: i64) -> bool {
        let at = self.killed.get(file);
        at.is_some_and(|at| at - to < 1_000_000)
    }

    /// Whether the process was suspended in this time. A resumed process needs a moment to notice
    /// its losses.
    fn was_stopped(&self, file: &str, from: i64, to: i64) -> bool {
        const MOMENT: i64 = 500_000;
        let mut stops = self.stopped.iter().filter(|stop| stop.0 == file);
        stops.any(|(_, stopped, resumed)| from < resumed + MOMENT && to > *stopped)
    }
}

/// A run of a tick.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) tick: i64,
    pub(crate) attempt: i32,
    pub(crate) held: Held,
    /// Whether the process was killed soon after the run, possibly before the end was stored.
    pub(crate) was_killed: bool,
}

/// The records of all processes.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Locks whose release was confirmed, by name.
    pub(crate) locks: HashMap<String, Vec<Held>>,
    /// Permits and terms, for as long as their holders trusted them, by name.
    pub(crate) believed: HashMap<String, Vec<Held>>,
    /// The times of granted attempts and checks, by the database's clock, by name.
    pub(crate) grants: HashMap<String, Vec<i64>>,
    pub(crate) runs: Vec<Run>,
    /// Tokens by name: not drawn before, known at, token.
    pub(crate) tokens: HashMap<String, Vec<(i64, i64, i64)>>,
    /// Keys of `Once` that this process ran first, and when the commit was acknowledged.
    pub(crate) once: Vec<(i64, i64)>,
    /// Round trips to the database by the number of the process: sent at, reply at.
    pub(crate) probes: HashMap<usize, Vec<(i64, i64)>>,
    pub(crate) counts: HashMap<String, u64>,
}

/// Reads all records in a directory.
pub(crate) fn read_all(directory: &Path, faults: &Faults) -> Result<Records, Box<dyn Error>> {
    let mut records = Records::default();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let file = path.to_string_lossy().into_owned();
        let end = faults.killed.get(&file).copied();
        let mut open: HashMap<&str, Vec<&str>> = HashMap::new();
        let text = std::fs::read_to_string(&path)?;
        for line in text.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["lock", name, from, to] => {
                    let held = Held {
                        from: from.parse()?,
                        to: to.parse()?,
                        token: 0,
                        end: End::Left,
                        was_stopped: false,
                    };
                    records.locks.entry(name.to_owned()).or_default().push(held);
                }
                ["enter", id, ..] => {
                    open.insert(id, fields);
                }
                ["leave", id, to, outcome] => {
                    let entered = open.remove(id).ok_or("`leave` without `enter`")?;
                    let end = match outcome {
                        "done" => End::Done,
                        "failed" => End::Failed,
                        "lost" => End::Lost,
                        _ => End::Left,
                    };
                    records.add(&entered, to.parse()?, end, &file, faults)?;
                }
                ["grant", name, at] => {
                    records
                        .grants
                        .entry(name.to_owned())
                        .or_default()
                        .push(at.parse()?);
                }
                ["token", name, since, until, token] => {
                    let token = (since.parse()?, until.parse()?, token.parse()?);
                    records
                        .tokens
                        .entry(name.to_owned())
                        .or_default()
                        .push(token);
                }
                ["once", key, at] => records.once.push((key.parse()?, at.parse()?)),
                ["probe", since, until] => {
                    let number = file.rsplit('-').next().unwrap_or_default();
                    let probes = records.probes.entry(number.parse()?).or_default();
                    probes.push((since.parse()?, until.parse()?));
                }
                ["count", name] => *records.counts.entry(name.to_owned()).or_default() += 1,
                _ => return Err(format!("unknown line in {file}: {line:?}").into()),
            }
        }
        for entered in open.into_values() {
            let end = end.ok_or_else(|| format!("{file}: no `leave` for {entered:?}"))?;
            records.add(&entered, end, End::Killed, &file, faults)?;
        }
    }
    // A process that replaced another has the same number, and a file of its own.
    for probes in records.probes.values_mut() {
        probes.sort_unstable();
    }
    Ok(records)
}

impl Records {
    fn add(
        &mut self,
        entered: &[&str],
        to: i64,
        end: End,
        file: &str,
        faults: &Faults,
    ) -> Result<(), Box<dyn Error>> {
        let ["enter", _, name, from, token, ref run @ ..] = *entered else {
            return Err(format!("malformed line in {file}: {entered:?}").into());
        };
        let from = from.parse()?;
        let held = Held {
            from,
            to,
            token: token.parse()?,
            end,
            was_stopped: faults.was_stopped(file, from, to),
        };
        if let [tick, attempt] = *run {
            self.runs.push(Run {
                name: name.to_owned(),
                tick: tick.parse()?,
                attempt: attempt.parse()?,
                held,
                was_killed: faults.was_killed(file, to),
            });
        } else {
            self.believed.entry(name.to_owned()).or_default().push(held);
        }
        Ok(())
    }
}
