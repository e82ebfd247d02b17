//! How rates are compared: the contenders take turns.
//!
//! A machine is never the same for long: other work comes and goes, clocks change, files grow. So each round lets every
//! contender run for a short slice, in an order that is shuffled for each round, and what is compared are the rates
//! of one round. The ratio is the median over the rounds, its spread what lies between when one round of ten is left out
//! at either end.

use std::future::Future;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) slice: Duration,
    pub(crate) warm_up: Duration,
}

/// Something that does one kind of operation again and again.
pub(crate) trait Contender {
    fn name(&self) -> &str;

    /// Works for about that long, and returns how many operations a second it did.
    fn run(&mut self, slice: Duration) -> f64;
}

pub(crate) type Contenders = Vec<Box<dyn Contender>>;

/// Lets the contenders take turns.
pub(crate) fn compare(plan: Plan, mut contenders: Contenders) -> Rates {
    for contender in &mut contenders {
        contender.run(plan.warm_up);
    }
    let mut rates = vec![Vec::with_capacity(plan.rounds); contenders.len()];
    let mut order: Vec<usize> = (0..contenders.len()).collect();
    for _ in 0..plan.rounds {
        fastrand::shuffle(&mut order);
        for &at in &order {
            rates[at].push(contenders[at].run(plan.slice));
        }
    }
    let names = contenders
        .iter()
        .map(|contender| contender.name().to_owned());
    Rates(names.zip(rates).collect())
}

/// The rate of each contender in each round.
pub(crate) struct Rates(Vec<(String, Vec<f64>)>);

/// Two contenders beside each other.
#[derive(Clone, Debug)]
pub(crate) struct Ratio {
    pub(crate) ours: f64,
    pub(crate) reference: f64,
    /// Of each round.
    pub(crate) ratios: Vec<f64>,
}

impl Rates {
    pub(crate) fn median(&self, name: &str) -> f64 {
        median(self.of(name))
    }

    pub(crate) fn ratio(&self, ours: &str, reference: &str) -> Ratio {
        let (a, b) = (self.of(ours), self.of(reference));
        Ratio {
            ours: median(a),
            reference: median(b),
            ratios: a.iter().zip(b).map(|(a, b)| a / b).collect(),
        }
    }

    /// In each round.
    pub(crate) fn of(&self, name: &str) -> &[f64] {
        let found = self.0.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("no contender {name}")).1
    }
}

impl Ratio {
    pub(crate) fn median(&self) -> f64 {
        median(&self.ratios)
    }

    /// Of ten rounds, one lies below it.
    pub(crate) fn low(&self) -> f64 {
        quantile(&self.ratios, 0.1)
    }

    /// Of ten rounds, one lies above it.
    pub(crate) fn high(&self) -> f64 {
        quantile(&self.ratios, 0.9)
    }
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which that share of them lies, between two of them if need be.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = share * (values.len() - 1) as f64;
    let (below, above) = (values[at.floor() as usize], values[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Threads of this process, each of which repeats its operation.
pub(crate) struct Threads {
    name: String,
    operations: Vec<Box<dyn FnMut() + Send>>,
}

/// Makes a contender of so many threads from what makes the operation of one.
pub(crate) fn threads<F>(
    name: &str,
    number: usize,
    mut make: impl FnMut(usize) -> F,
) -> Box<dyn Contender>
where
    F: FnMut() + Send + 'static,
{
    let operations = (0..number).map(|thread| Box::new(make(thread)) as Box<dyn FnMut() + Send>);
    Box::new(Threads {
        name: name.to_owned(),
        operations: operations.collect(),
    })
}

impl Contender for Threads {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, slice: Duration) -> f64 {
        let start = Barrier::new(self.operations.len());
        thread::scope(|scope| {
            let work = |operation: &'_ mut Box<dyn FnMut() + Send>| {
                start.wait();
                let began = Instant::now();
                let mut count = 0_u32;
                while began.elapsed() < slice {
                    operation();
                    count += 1;
                }
                f64::from(count) / began.elapsed().as_secs_f64()
            };
            let threads: Vec<_> = self
                .operations
                .iter_mut()
                .map(|operation| scope.spawn(move || work(operation)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a contender does not panic"))
                .sum()
        })
    }
}

/// Tasks of an asynchronous runtime, each of which repeats its operation.
struct Tasks<F> {
    name: String,
    number: usize,
    runtime: Arc<Runtime>,
    operation: F,
}

/// Makes a contender of so many tasks from the operation, which is told its task.
pub(crate) fn tasks<F, O>(
    name: &str,
    number: usize,
    runtime: &Arc<Runtime>,
    operation: F,
) -> Box<dyn Contender>
where
    F: Fn(usize) -> O + Clone + Send + 'static,
    O: Future<Output = ()> + Send,
{
    Box::new(Tasks {
        name: name.to_owned(),
        number,
        runtime: Arc::clone(runtime),
        operation,
    })
}

impl<F, O> Contender for Tasks<F>
where
    F: Fn(usize) -> O + Clone + Send + 'static,
    O: Future<Output = ()> + Send,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, slice: Duration) -> f64 {
        let tasks: Vec<_> = (0..self.number)
            .map(|task| {
                let operation = self.operation.clone();
                self.runtime.spawn(async move {
                    let began = Instant::now();
                    let mut count = 0_u32;
                    while began.elapsed() < slice {
                        operation(task).await;
                        count += 1;
                    }
                    f64::from(count) / began.elapsed().as_secs_f64()
                })
            })
            .collect();
        self.runtime.block_on(async {
            let mut rate = 0.0;
            for task in tasks {
                rate += task.await.expect("a contender does not panic");
            }
            rate
        })
    }
}
