//! The `tracing` events of all threads of this process, by the name of their handle.

use std::fmt::Debug;
use std::sync::{Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

static EVENTS: Mutex<Vec<Logged>> = Mutex::new(Vec::new());

struct Logged {
    level: Level,
    name: String,
    /// `operation: outcome`.
    what: String,
    message: String,
}

struct Collect;

#[derive(Default)]
struct Fields {
    name: String,
    operation: String,
    outcome: String,
    message: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let of_event = match field.name() {
            "name" => &mut self.name,
            "operation" => &mut self.operation,
            "outcome" => &mut self.outcome,
            "message" => &mut self.message,
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
            EVENTS.lock().unwrap().push(Logged {
                level: *event.metadata().level(),
                name: fields.name,
                what: format!("{}: {}", fields.operation, fields.outcome),
                message: fields.message,
            });
        }
    }
}

/// The events of a name that only one test uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log(&'static str);

impl Log {
    /// The first call installs the subscriber, so call it before the operations.
    pub(crate) fn of(name: &'static str) -> Self {
        static INSTALLED: OnceLock<()> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            set_global_default(tracing_subscriber::registry().with(Collect)).unwrap();
        });
        Self(name)
    }

    fn of_level(self, is_level: impl Fn(Level) -> bool) -> Vec<String> {
        let events = EVENTS.lock().unwrap();
        let of_name = events.iter().filter(|it| it.name == self.0);
        let of_level = of_name.filter(|it| is_level(it.level));
        of_level.map(|it| it.what.clone()).collect()
    }

    /// The events at the level WARN or ERROR. Not those of long waits: on a slow machine each wait may be one.
    pub(crate) fn warnings(self) -> Vec<String> {
        let mut warnings = self.of_level(|level| level <= Level::WARN);
        warnings.retain(|what| !what.ends_with(": waiting"));
        warnings
    }

    /// The warnings of long waits.
    pub(crate) fn long_waits(self) -> Vec<String> {
        let events = EVENTS.lock().unwrap();
        let of_name = events.iter().filter(|it| it.name == self.0);
        let of_waits =
            of_name.filter(|it| it.what.ends_with(": waiting") && it.level == Level::WARN);
        of_waits.map(|it| it.message.clone()).collect()
    }

    /// How many events have this text, at any level.
    pub(crate) fn count(self, what: &str) -> usize {
        self.of_level(|_| true)
            .iter()
            .filter(|it| *it == what)
            .count()
    }
}
