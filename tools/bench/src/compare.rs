//! How rates are compared: the contenders take turns.
//!
//! A machine is never the same for long: other work comes and goes, clocks change, files grow. So each round lets every contender
//! work for a moment, in an order that is shuffled, and what is compared are the rates of one round.

use std::future::Future;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    pub(crate) turn: Duration,
}

/// Something that does one kind of operation again and again.
pub(crate) trait Contender {
    /// Works for about that long, and returns how many operations a second it did.
    fn run(&mut self, turn: Duration) -> f64;
}

pub(crate) type Boxed = Box<dyn Contender>;

/// The median over the rounds, and what one round in ten is below and above.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Two rates, and how they compare.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    pub(crate) ours: f64,
    pub(crate) reference: f64,
    pub(crate) ratio: Spread,
}

/// Lets both take turns.
pub(crate) fn compare(plan: Plan, ours: Boxed, reference: Boxed) -> Comparison {
    let mut contenders = [ours, reference];
    for contender in &mut contenders {
        warm_up(plan, contender);
    }
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..plan.rounds {
        let first = usize::from(fastrand::bool());
        for at in [first, 1 - first] {
            rates[at].push(contenders[at].run(plan.turn));
        }
    }
    let [ours, reference] = rates;
    let ratios: Vec<f64> = ours.iter().zip(&reference).map(|(a, b)| a / b).collect();
    Comparison {
        ours: quantile(&ours, 0.5),
        reference: quantile(&reference, 0.5),
        ratio: Spread::of(&ratios),
    }
}

/// The rate of one contender.
pub(crate) fn measure(plan: Plan, mut contender: Boxed) -> Spread {
    warm_up(plan, &mut contender);
    let rates: Vec<f64> = (0..plan.rounds).map(|_| contender.run(plan.turn)).collect();
    Spread::of(&rates)
}

/// A first turn, which prepares statements and fills caches, does not count.
fn warm_up(plan: Plan, contender: &mut Boxed) {
    contender.run(plan.turn.min(Duration::from_secs(1)));
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(values, share));
        Self { median, low, high }
    }
}

/// The value below which that share of them lies, between two of them if need be.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = share * (values.len() - 1) as f64;
    let (below, above) = (values[at.floor() as usize], values[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Threads, each of which repeats its operation.
struct Threads(Vec<Box<dyn FnMut() + Send>>);

/// A contender of so many threads, from what makes the operation of one.
pub(crate) fn threads<F: FnMut() + Send + 'static>(
    number: usize,
    make: impl FnMut(usize) -> F,
) -> Boxed {
    let operations = (0..number).map(make);
    Box::new(Threads(
        operations
            .map(|operation| Box::new(operation) as _)
            .collect(),
    ))
}

impl Contender for Threads {
    fn run(&mut self, turn: Duration) -> f64 {
        let start = Barrier::new(self.0.len());
        thread::scope(|scope| {
            let threads: Vec<_> = self
                .0
                .iter_mut()
                .map(|operation| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        let (began, mut count) = (Instant::now(), 0_u32);
                        while began.elapsed() < turn {
                            operation();
                            count += 1;
                        }
                        f64::from(count) / began.elapsed().as_secs_f64()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a contender does not panic"))
                .sum()
        })
    }
}

/// Tasks, each of which repeats its operation on its state.
struct Tasks<S, F> {
    states: Vec<Option<S>>,
    operation: F,
}

/// A contender of so many tasks, each of which does an operation on what `make` makes for it, and gives that back.
pub(crate) fn tasks<S, F, O>(number: usize, make: impl FnMut(usize) -> S, operation: F) -> Boxed
where
    S: Send + 'static,
    F: Fn(S) -> O + Clone + Send + 'static,
    O: Future<Output = S> + Send,
{
    Box::new(Tasks {
        states: (0..number).map(make).map(Some).collect(),
        operation,
    })
}

impl<S, F, O> Contender for Tasks<S, F>
where
    S: Send + 'static,
    F: Fn(S) -> O + Clone + Send + 'static,
    O: Future<Output = S> + Send,
{
    fn run(&mut self, turn: Duration) -> f64 {
        let tasks: Vec<_> = self
            .states
            .iter_mut()
            .map(|state| {
                let mut state = state.take().expect("it was given back");
                let operation = self.operation.clone();
                workbench::runtime().spawn(async move {
                    let (began, mut count) = (Instant::now(), 0_u32);
                    while began.elapsed() < turn {
                        state = operation(state).await;
                        count += 1;
                    }
                    (state, f64::from(count) / began.elapsed().as_secs_f64())
                })
            })
            .collect();
        let mut sum = 0.0;
        for (at, task) in tasks.into_iter().enumerate() {
            let (state, rate) = workbench::block_on(task).expect("a contender does not panic");
            self.states[at] = Some(state);
            sum += rate;
        }
        sum
    }
}
