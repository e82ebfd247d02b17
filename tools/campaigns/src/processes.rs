//! The worker processes.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::record::now;
use crate::worker::{Campaign, Settings};

/// The worker processes of a campaign and the paths of their records. Dropping kills them.
pub(crate) struct Processes {
    campaign: Campaign,
    /// The URL to which each of them connects.
    urls: Vec<String>,
    directory: PathBuf,
    workers: Vec<(Child, String)>,
    started: usize,
}

impl Processes {
    pub(crate) fn new(campaign: Campaign, urls: Vec<String>, directory: PathBuf) -> Self {
        Self {
            campaign,
            urls,
            directory,
            workers: Vec::new(),
            started: 0,
        }
    }

    pub(crate) fn start_all(&mut self) -> Result<(), Box<dyn Error>> {
        for number in 0..self.campaign.processes() {
            let worker = self.start(number)?;
            self.workers.push(worker);
        }
        Ok(())
    }

    fn start(&mut self, number: usize) -> Result<(Child, String), Box<dyn Error>> {
        // `record.rs` reads the number of the process from the end of the name.
        let record = self.directory.join(format!("{}-{number}", self.started));
        let record = record.to_string_lossy().into_owned();
        self.started += 1;
        let environment = Settings::environment(
            self.campaign,
            number,
            &self.urls[number],
            &record,
            fastrand::u64(..),
        );
        let worker = Command::new(env::current_exe()?)
            .envs(environment)
            .stdin(Stdio::piped())
            .spawn()?;
        Ok((worker, record))
    }

    /// The path of the record of a process.
    pub(crate) fn record(&self, number: usize) -> &str {
        &self.workers[number].1
    }

    /// Kills a process and starts another in its place. Returns the killed one's record.
    pub(crate) fn replace(&mut self, number: usize) -> Result<String, Box<dyn Error>> {
        let started = self.start(number)?;
        let (mut worker, record) = std::mem::replace(&mut self.workers[number], started);
        worker.kill()?;
        worker.wait()?;
        Ok(record)
    }

    /// Suspends a process for a while. Returns from when to when.
    pub(crate) fn suspend(
        &self,
        number: usize,
        length: Duration,
    ) -> Result<(i64, i64), Box<dyn Error>> {
        let signal = |signal: &str| {
            let id = self.workers[number].0.id().to_string();
            Command::new("kill").args([signal, &id]).status()
        };
        let from = now();
        signal("-STOP")?;
        thread::sleep(length);
        signal("-CONT")?;
        Ok((from, now()))
    }

    pub(crate) fn check_alive(&mut self) -> Result<(), Box<dyn Error>> {
        for (worker, record) in &mut self.workers {
            if let Some(status) = worker.try_wait()? {
                return Err(format!("{record} has ended: {status}").into());
            }
        }
        Ok(())
    }

    /// Tells all processes to end, and fails if one does not end, or fails.
    pub(crate) fn finish(&mut self) -> Result<(), Box<dyn Error>> {
        for (worker, _) in &mut self.workers {
            drop(worker.stdin.take());
        }
        let end = Instant::now() + Duration::from_secs(90);
        for (worker, record) in &mut self.workers {
            let status = loop {
                match worker.try_wait()? {
                    Some(status) => break status,
                    None if Instant::now() > end => {
                        return Err(format!("{record} does not end").into());
                    }
                    None => thread::sleep(Duration::from_millis(10)),
                }
            };
            if !status.success() {
                return Err(format!("{record}: {status}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (worker, _) in &mut self.workers {
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}
