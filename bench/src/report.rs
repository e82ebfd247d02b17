//! What was measured: lines to read as they come, and JSON for programs.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use crate::cores::{self, Cores};
use crate::harness::{Rates, Ratio};

/// All that was measured so far.
pub(crate) struct Report {
    began: Instant,
    environment: Value,
    entries: Vec<Value>,
    missed: Vec<String>,
    scenario: &'static str,
    threads: usize,
    /// What the clients are: threads or tasks.
    clients: &'static str,
}

/// What a ratio is to be, at least.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Goal {
    pub(crate) floor: Option<f64>,
    pub(crate) aim: Option<f64>,
}

pub(crate) const NO_GOAL: Goal = Goal {
    floor: None,
    aim: None,
};

pub(crate) fn at_least(floor: f64) -> Goal {
    Goal {
        floor: Some(floor),
        aim: None,
    }
}

impl Goal {
    pub(crate) fn aiming_at(self, aim: f64) -> Self {
        Self {
            aim: Some(aim),
            ..self
        }
    }
}

impl Report {
    pub(crate) fn new(environment: Value) -> Self {
        println!(
            "Rates are operations a second; a ratio above 1 means that ours is faster. [what lies between in eight of ten rounds]"
        );
        for (name, value) in environment.as_object().expect("an object") {
            println!(
                "  {name}: {}",
                value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned)
            );
        }
        Self {
            began: Instant::now(),
            environment,
            entries: Vec::new(),
            missed: Vec::new(),
            scenario: "",
            threads: 0,
            clients: "thread",
        }
    }

    /// Begins a scenario, for what follows: on one core if there is one client, which always waits for the server or
    /// lets it wait.
    pub(crate) fn scenario(&mut self, scenario: &'static str, threads: usize) {
        let cores = if threads == 1 { Cores::One } else { Cores::All };
        self.scenario_on(cores, scenario, threads);
    }

    /// Begins a scenario on so many cores.
    pub(crate) fn scenario_on(&mut self, cores: Cores, scenario: &'static str, threads: usize) {
        self.begin(cores, scenario, threads, "thread");
    }

    /// Begins a scenario of so many tasks of a runtime.
    pub(crate) fn tasks(&mut self, cores: Cores, scenario: &'static str, tasks: usize) {
        self.begin(cores, scenario, tasks, "task");
    }

    fn begin(
        &mut self,
        cores: Cores,
        scenario: &'static str,
        number: usize,
        clients: &'static str,
    ) {
        cores::assign(cores);
        let seconds = self.began.elapsed().as_secs();
        let plural = if number == 1 { "" } else { "s" };
        println!("\n{scenario}, {number} {clients}{plural}  ({seconds} s)");
        (self.scenario, self.threads, self.clients) = (scenario, number, clients);
    }

    /// Adds the ratio of the rates of two contenders.
    pub(crate) fn ratio(&mut self, rates: &Rates, ours: &str, reference: &str, goal: Goal) {
        self.add_ratio(
            &format!("{ours} / {reference}"),
            "operations/s",
            &rates.ratio(ours, reference),
            goal,
        );
    }

    /// Adds a ratio. Its `ours` and `reference` have the unit; the ratio is one of rates.
    pub(crate) fn add_ratio(&mut self, what: &str, unit: &str, ratio: &Ratio, goal: Goal) {
        let name = format!("{}, {}, {}", self.scenario, self.threads, what);
        let (middle, low, high) = (ratio.median(), ratio.low(), ratio.high());
        let met = goal.floor.map(|floor| middle >= floor);
        let verdict = match (goal.floor, met) {
            (Some(floor), Some(true)) => format!("  at least {floor}: met"),
            (Some(floor), _) => format!("  at least {floor}: MISSED"),
            (None, _) => String::new(),
        };
        println!(
            "  {what:<58} {:>9} / {:>9}  = {middle:>6.2} [{low:.2} .. {high:.2}]{verdict}",
            number(ratio.ours),
            number(ratio.reference),
        );
        if met == Some(false) {
            self.missed
                .push(format!("{name}: {middle:.2} [{low:.2} .. {high:.2}]"));
        }
        self.entries.push(json!({
            "name": name,
            "scenario": self.scenario,
            "threads": self.threads,
            "clients": self.clients,
            "what": what,
            "unit": unit,
            "ours": ratio.ours,
            "reference": ratio.reference,
            "ratio": middle,
            "low": low,
            "high": high,
            "goal": goal.floor,
            "aim": goal.aim,
            "met": met,
            "rounds": ratio.ratios,
        }));
    }

    /// Adds a figure that is compared with nothing.
    pub(crate) fn figure(&mut self, what: &str, unit: &str, value: f64) {
        self.add_figure(what, unit, value, None);
    }

    /// Adds a figure with a bound, which is the goal.
    pub(crate) fn figure_within(&mut self, what: &str, unit: &str, value: f64, most: f64) {
        self.add_figure(what, unit, value, Some(most));
    }

    fn add_figure(&mut self, what: &str, unit: &str, value: f64, most: Option<f64>) {
        let name = format!("{}, {}, {}", self.scenario, self.threads, what);
        let met = most.map(|most| value <= most);
        let verdict = match (most, met) {
            (Some(most), Some(true)) => format!("  at most {most}: met"),
            (Some(most), _) => format!("  at most {most}: MISSED"),
            (None, _) => String::new(),
        };
        println!("  {what:<58} {:>9} {unit}{verdict}", number(value));
        if met == Some(false) {
            self.missed
                .push(format!("{name}: {} {unit}", number(value)));
        }
        self.entries.push(json!({
            "name": name,
            "scenario": self.scenario,
            "threads": self.threads,
            "clients": self.clients,
            "what": what,
            "unit": unit,
            "ours": value,
            "reference": null,
            "ratio": null,
            "low": null,
            "high": null,
            "goal": null,
            "aim": null,
            "most": most,
            "met": met,
            "rounds": [],
        }));
    }

    /// Says which goals were missed, and how fast the machine is now.
    pub(crate) fn finish(&mut self, after: Value) {
        println!("\nafter it: {after}");
        self.environment["after"] = after;
        println!(
            "{} figures in {} s",
            self.entries.len(),
            self.began.elapsed().as_secs()
        );
        match self.missed.len() {
            0 => println!("every goal was met"),
            missed => println!(
                "{missed} goals were missed:\n  {}",
                self.missed.join("\n  ")
            ),
        }
    }

    /// Writes what there is so far.
    pub(crate) fn save(&self, file: &Path) {
        let document = json!({
            "ratio": "ours / reference, as rates: above 1, ours is faster; `low` and `high` leave out one round of ten each; all are in `rounds`",
            "environment": self.environment,
            "entries": self.entries,
        });
        let text = serde_json::to_string_pretty(&document).expect("it is JSON");
        std::fs::write(file, text + "\n")
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}

/// Three digits that matter.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}
