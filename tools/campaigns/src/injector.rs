//! Injects random faults.

use std::error::Error;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use workbench::{Cluster, Database, RoundTrips, StopMode};

use crate::processes::Processes;
use crate::record::{Faults, now};
use crate::worker::Campaign;

pub(crate) struct Injector<'a> {
    campaign: Campaign,
    cluster: &'a Cluster,
    database: &'a Database,
    proxies: &'a [RoundTrips],
    processes: Processes,
    faults: Faults,
}

impl<'a> Injector<'a> {
    pub(crate) fn new(
        campaign: Campaign,
        cluster: &'a Cluster,
        database: &'a Database,
        proxies: &'a [RoundTrips],
        directory: PathBuf,
    ) -> Self {
        let urls = proxies.iter().map(|proxy| proxy.url()).collect();
        Self {
            campaign,
            cluster,
            database,
            proxies,
            processes: Processes::new(campaign, urls, directory),
            faults: Faults::default(),
        }
    }

    pub(crate) fn run(&mut self, length: Duration) -> Result<(), Box<dyn Error>> {
        self.processes.start_all()?;
        let end = Instant::now() + length;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(fastrand::u64(self.campaign.pauses())));
            match fastrand::u8(..24) {
                _ if self.campaign == Campaign::Schedules => self.kill()?,
                0..5 => self.kill()?,
                5..10 => self.signal("terminate"),
                10..15 => self.signal("cancel"),
                15..17 => self.cut(),
                17..19 => self.sever(),
                19..21 => self.stop()?,
                21..23 => self.slow_down(),
                _ => self.restart(),
            }
            self.processes.check_alive()?;
        }
        Ok(())
    }

    /// Ends the processes, each of which checks its pool.
    pub(crate) fn finish(mut self) -> Result<Faults, Box<dyn Error>> {
        self.processes.finish()?;
        Ok(self.faults)
    }

    fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        let number = fastrand::usize(..self.campaign.processes());
        let record = self.processes.replace(number)?;
        println!("kill -9 of worker {number}");
        self.faults.killed.insert(record, now());
        Ok(())
    }

    /// Suspends a process, sometimes for longer than a timeout.
    fn stop(&mut self) -> Result<(), Box<dyn Error>> {
        let number = fastrand::usize(..self.campaign.processes());
        let length = self.random_length();
        println!("stop worker {number} for {length:?}");
        let (from, to) = self.processes.suspend(number, length)?;
        let record = self.processes.record(number).to_owned();
        self.faults.stopped.push((record, from, to));
        Ok(())
    }

    /// Blocks writes to the tables of permits and schedules, sometimes for longer than a timeout.
    fn slow_down(&self) {
        let length = self.random_length();
        println!("nothing is written for {length:?}");
        let sql = format!(
            "BEGIN; LOCK TABLE resource_control.service_request, resource_control.schedule IN SHARE MODE;
            SELECT pg_sleep({}); COMMIT",
            length.as_secs_f64()
        );
        let _ = self.database.connect().batch_execute(&sql);
    }

    /// Up to 1.7 timeouts, so longer than one in four cases of ten.
    fn random_length(&self) -> Duration {
        self.campaign.timeout().mul_f64(fastrand::f64() * 1.7)
    }

    /// Terminates or cancels a random fifth of the workers' sessions.
    fn signal(&self, what: &str) {
        let sql = format!(
            "SELECT pg_{what}_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
                AND pid <> pg_backend_pid() AND random() < 0.2"
        );
        println!("{what} sessions");
        // Fails if it terminates this session, or if the server was just restarted.
        let _ = self.database.connect().batch_execute(&sql);
    }

    /// Cuts the network of a process, sometimes for longer than a timeout.
    fn cut(&self) {
        let number = fastrand::usize(..self.proxies.len());
        let length = self.random_length();
        println!("cut the network of worker {number} for {length:?}");
        self.proxies[number].cut();
        thread::sleep(length);
        self.proxies[number].restore();
    }

    fn sever(&self) {
        let number = fastrand::usize(..self.proxies.len());
        println!("close the connections of worker {number}");
        self.proxies[number].sever();
    }

    fn restart(&self) {
        let mode = if fastrand::bool() {
            StopMode::Fast
        } else {
            StopMode::Immediate
        };
        println!("restart the server: {mode:?}");
        self.cluster.restart(mode);
    }
}
