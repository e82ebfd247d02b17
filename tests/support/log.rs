//! What all threads of this process tell, by the name of what they tell it of.

use std::fmt::Debug;
use std::sync::{Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

static TOLD: Mutex<Vec<Told>> = Mutex::new(Vec::new());

struct Told {
    level: Level,
    name: String,
    /// `operation: outcome`.
    what: String,
}

struct Collect;

#[derive(Default)]
struct Fields {
    name: String,
    operation: String,
    outcome: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let of_event = match field.name() {
            "name" => &mut self.name,
            "operation" => &mut self.operation,
            "outcome" => &mut self.outcome,
            _ => return,
        };
        *of_event = format!("{value:?}").trim_matches('"').to_owned();
    }
}

impl<S: Subscriber> Layer<S> for Collect {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "diesel_interlock" {
            let mut fields = Fields::default();
            event.record(&mut fields);
            TOLD.lock().unwrap().push(Told {
                level: *event.metadata().level(),
                name: fields.name,
                what: format!("{}: {}", fields.operation, fields.outcome),
            });
        }
    }
}

/// The events of a name, which only one test uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log(&'static str);

impl Log {
    /// The first call installs the subscriber, so it comes before the operations.
    pub(crate) fn of(name: &'static str) -> Self {
        static INSTALLED: OnceLock<()> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            set_global_default(tracing_subscriber::registry().with(Collect)).unwrap();
        });
        Self(name)
    }

    fn of_level(self, is_level: impl Fn(Level) -> bool) -> Vec<String> {
        let told = TOLD.lock().unwrap();
        let of_name = told.iter().filter(|it| it.name == self.0);
        let of_level = of_name.filter(|it| is_level(it.level));
        of_level.map(|it| it.what.clone()).collect()
    }

    /// What is logged as a warning, or worse.
    pub(crate) fn warnings(self) -> Vec<String> {
        self.of_level(|level| level <= Level::WARN)
    }

    /// How often this was told, at any level.
    pub(crate) fn count(self, what: &str) -> usize {
        self.of_level(|_| true)
            .iter()
            .filter(|it| *it == what)
            .count()
    }
}
