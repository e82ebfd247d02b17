//! Faults of the processes during a failover.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};

use workbench::RoundTrips;

use super::pause;
use crate::processes::Processes;
use crate::record::{Faults, now};
use crate::worker::Campaign;

pub(super) struct Disturber {
    processes: Processes,
    faults: Faults,
}

impl Disturber {
    pub(super) fn new(processes: Processes) -> Self {
        Self {
            processes,
            faults: Faults::default(),
        }
    }

    /// Injects one fault after another until the failover is over, but at least one.
    pub(super) fn run(
        &mut self,
        proxies: &[RoundTrips],
        is_over: &AtomicBool,
    ) -> Result<(), String> {
        loop {
            pause(0..1500);
            // A boxed error is not `Send`, so it cannot leave the thread.
            let disturbed = self.disturb(proxies);
            disturbed.map_err(|error| error.to_string())?;
            if is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    }

    /// Kills a process, or suspends it or cuts it off, sometimes for longer than a lease.
    fn disturb(&mut self, proxies: &[RoundTrips]) -> Result<(), Box<dyn Error>> {
        let number = fastrand::usize(..proxies.len());
        let length = Campaign::Failover.timeout().mul_f64(fastrand::f64() * 1.7);
        let from = now();
        match fastrand::u8(..3) {
            0 => {
                println!("  kill -9 of worker {number}");
                let record = self.processes.replace(number)?;
                self.faults.killed.insert(record, now());
            }
            1 => {
                println!("  stop worker {number} for {length:?}");
                let (from, to) = self.processes.suspend(number, length)?;
                let record = self.processes.record(number).to_owned();
                self.faults.stopped.push((record, from, to));
            }
            _ => {
                println!("  cut the network of worker {number} for {length:?}");
                proxies[number].cut();
                std::thread::sleep(length);
                proxies[number].restore();
            }
        }
        self.faults.away.push((number, from, now()));
        self.processes.check_alive()
    }

    pub(super) fn check_alive(&mut self) -> Result<(), Box<dyn Error>> {
        self.processes.check_alive()
    }

    /// Ends the processes. Returns the faults that were injected.
    pub(super) fn finish(mut self) -> Result<Faults, Box<dyn Error>> {
        self.processes.finish()?;
        Ok(self.faults)
    }
}
