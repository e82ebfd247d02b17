//! The rest of the crate, as far as the sources of the model use it.

pub(crate) mod error {
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum Error {
        Pool(&'static str),
        PermitLost(String),
        TimedOut,
    }

    impl Error {
        pub(crate) const fn copy_unavailable(&self) -> Option<Self> {
            match self {
                Self::Pool(cause) => Some(Self::Pool(cause)),
                Self::PermitLost(_) => None,
                Self::TimedOut => Some(Self::TimedOut),
            }
        }
    }

    pub(crate) type Result<T> = std::result::Result<T, Error>;
}

pub(crate) mod key {
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub(crate) struct LockId(pub(crate) i64);
}

pub(crate) mod long_wait {
    pub(crate) const LONG: std::time::Duration = std::time::Duration::from_secs(5);
}

pub(crate) mod event {
    use crate::error::Result;
    use crate::sync::Instant;

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Subject;

    impl Subject {
        pub(crate) fn begins_later(self) -> bool {
            false
        }

        pub(crate) fn end(self, _: &str, _: Instant, _: Instant, _: &Result<()>) {}

        pub(crate) async fn observe_as<T>(
            self,
            _: &str,
            _: fn(&T) -> &'static str,
            work: impl Future<Output = Result<T>>,
        ) -> Result<T> {
            work.await
        }
    }

    pub(crate) trait Outcome {
        fn word(&self) -> &'static str;
    }
}

pub(crate) mod input {
    pub(crate) const fn whole_seconds(duration: std::time::Duration) -> u64 {
        duration.as_secs()
    }
}

pub(crate) mod metrics {
    use crate::event::Subject;

    #[derive(Debug, Default)]
    pub(crate) struct Counters {}

    impl Counters {
        pub(crate) fn count(&self, _: Subject, _: bool, _: &str) {}
    }

    #[derive(Debug)]
    pub(crate) struct Raised;

    impl Raised {
        pub(crate) fn held(_: Subject) -> Self {
            Self
        }
    }
}

pub(crate) mod sql_types {
    #[derive(Debug)]
    pub(crate) struct Bool;
}

pub(crate) mod statement {
    use std::marker::PhantomData;
    use std::time::Duration;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub(crate) struct Database(pub(crate) i32);

    /// Renews the row of a lease, or ends it.
    #[derive(Debug)]
    pub(crate) struct Statement<T> {
        pub(crate) renews_for: Option<Duration>,
        pub(crate) rows: PhantomData<T>,
    }
}

pub(crate) mod pool {
    use std::time::Duration;

    macro_rules! impl_debug {
        ($($anything:tt)*) => {};
    }
    pub(crate) use impl_debug;

    pub(crate) type Reply<'a, P, T> = <<P as Pool>::Mode as Mode>::Reply<'a, Result<T>>;

    use crate::error::Result;
    use crate::mode::Mode;

    pub(crate) trait Pool: Clone + Send + Sync + 'static {
        type Mode: Mode;

        /// Sends the statement of a lease. Returns whether the row was held.
        fn send(
            &self,
            renews_for: Option<Duration>,
        ) -> impl Future<Output = Result<bool>> + Send + 'static;
    }
}

pub(crate) mod call {
    use crate::error::{Error, Result};
    use crate::mode::Mode;
    use crate::pool::Pool;
    use crate::statement::Statement;
    use crate::sync::{AtomicBool, Instant, Ordering::SeqCst};

    pub(crate) async fn ask<P: Pool, T>(
        pool: &P,
        _: Option<Instant>,
        [statement]: [Statement<T>; 1],
    ) -> Result<(bool, Instant)> {
        let (sent, reply) = (Instant::now(), pool.send(statement.renews_for));
        Ok((P::Mode::run(reply).await?, sent))
    }

    pub(crate) async fn ask_again<P: Pool, T: Send>(
        pool: &P,
        connect_by: Option<Instant>,
        deadline: Option<Instant>,
        statement: Statement<T>,
        unanswered: &AtomicBool,
    ) -> Result<bool> {
        let asked = P::Mode::within(deadline, ask(pool, connect_by, [statement])).await;
        let reply = asked.unwrap_or(Err(Error::TimedOut));
        if let Err(error) = &reply {
            unanswered.fetch_or(!matches!(error, Error::Pool(_)), SeqCst);
        }
        Ok(reply?.0)
    }

    pub(crate) async fn ask_detached<P: Pool, T: Send + 'static, V: Send + 'static>(
        pool: &P,
        deadline: Option<Instant>,
        statement: Statement<T>,
        then: impl FnOnce(bool, Instant) -> V + Send + 'static,
    ) -> Result<V> {
        let pool = pool.clone();
        P::Mode::run_detached(&P::Mode::runtime()?, None, async move {
            let (reply, sent) = ask(&pool, deadline, [statement]).await?;
            Ok(then(reply, sent))
        })
        .await
    }
}

pub(crate) mod mode {
    use std::future::{poll_fn, ready};
    use std::pin::{Pin, pin};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use crate::alarm::Alarm;
    use crate::clock::{block_on, lock, sleep_until, spawn};
    use crate::error::Result;
    use crate::sync::Instant;

    pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

    pub(crate) trait Mode: Send + Sync + 'static {
        type Runtime: Send + Sync + Default;
        type Reply<'a, T: Send + 'a>;

        fn drive<'a, T: Send + 'a>(
            operation: impl Future<Output = T> + Send + 'a,
        ) -> Self::Reply<'a, T>;

        fn runtime() -> Result<Self::Runtime> {
            Ok(Default::default())
        }

        /// Awaits the server.
        fn run<T: Send>(
            operation: impl Future<Output = T> + Send,
        ) -> impl Future<Output = T> + Send;

        fn run_detached<T: Send + 'static>(
            runtime: &Self::Runtime,
            patience: Option<Duration>,
            operation: impl Future<Output = Result<T>> + Send + 'static,
        ) -> impl Future<Output = Result<T>> + Send;

        fn in_background(
            runtime: &Self::Runtime,
            operation: impl Future<Output = ()> + Send + 'static,
        );

        fn within<T: Send>(
            deadline: Option<Instant>,
            operation: impl Future<Output = T> + Send,
        ) -> impl Future<Output = Option<T>> + Send;

        fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send;
    }

    #[derive(Debug, Clone)]
    pub(crate) enum Blocking {}

    #[derive(Debug, Clone)]
    pub(crate) enum Async {}

    /// One poll completes it.
    fn now<T>(operation: impl Future<Output = T>) -> T {
        match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => value,
            Poll::Pending => unreachable!("it blocks"),
        }
    }

    impl Mode for Blocking {
        type Runtime = ();
        type Reply<'a, T: Send + 'a> = T;

        fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> T {
            now(operation)
        }

        fn run<T: Send>(
            operation: impl Future<Output = T> + Send,
        ) -> impl Future<Output = T> + Send {
            ready(block_on(operation))
        }

        fn run_detached<T: Send + 'static>(
            (): &(),
            _: Option<Duration>,
            operation: impl Future<Output = Result<T>> + Send + 'static,
        ) -> impl Future<Output = Result<T>> + Send {
            ready(now(operation))
        }

        fn in_background((): &(), operation: impl Future<Output = ()> + Send + 'static) {
            spawn(move || now(operation));
        }

        fn within<T: Send>(
            _: Option<Instant>,
            operation: impl Future<Output = T> + Send,
        ) -> impl Future<Output = Option<T>> + Send {
            ready(Some(now(operation)))
        }

        fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send {
            alarm.block(deadline);
            ready(())
        }
    }

    /// Its drop lets the task of `run_detached` go on for a time.
    struct Caller(Arc<Alarm>, Option<Duration>);

    impl Drop for Caller {
        fn drop(&mut self) {
            if let Some(patience) = self.1 {
                self.0.set(Instant::now() + patience);
            }
        }
    }

    impl Mode for Async {
        type Runtime = ();
        type Reply<'a, T: Send + 'a> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

        fn drive<'a, T: Send + 'a>(
            operation: impl Future<Output = T> + Send + 'a,
        ) -> Self::Reply<'a, T> {
            Box::pin(operation)
        }

        fn run<T: Send>(
            operation: impl Future<Output = T> + Send,
        ) -> impl Future<Output = T> + Send {
            operation
        }

        async fn run_detached<T: Send + 'static>(
            (): &(),
            patience: Option<Duration>,
            operation: impl Future<Output = Result<T>> + Send + 'static,
        ) -> Result<T> {
            let gone = Caller(Arc::new(Alarm::unset()), patience);
            let (done, alarm) = (Arc::new(Mutex::new((None, None::<Waker>))), gone.0.clone());
            let caller = done.clone();
            spawn(move || {
                let (mut is_over, mut operation) =
                    (pin!(Self::sleep(&alarm, None)), Box::pin(operation));
                let value = block_on(poll_fn(|context| match is_over.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(None),
                    Poll::Pending => operation.as_mut().poll(context).map(Some),
                }));
                drop(operation);
                let mut done = lock(&done);
                done.0 = value;
                let waker = done.1.take();
                drop(done);
                waker.inspect(Waker::wake_by_ref);
            });
            poll_fn(|context| {
                let mut done = lock(&caller);
                done.1 = Some(context.waker().clone());
                done.0.take().map_or(Poll::Pending, Poll::Ready)
            })
            .await
        }

        fn in_background((): &(), operation: impl Future<Output = ()> + Send + 'static) {
            spawn(move || block_on(operation));
        }

        async fn within<T: Send>(
            deadline: Option<Instant>,
            operation: impl Future<Output = T> + Send,
        ) -> Option<T> {
            let mut operation = pin!(operation);
            let Some(deadline) = deadline else {
                return Some(operation.await);
            };
            let mut timer = pin!(sleep_until(deadline));
            poll_fn(|context| match operation.as_mut().poll(context) {
                Poll::Ready(value) => Poll::Ready(Some(value)),
                Poll::Pending => timer.as_mut().poll(context).map(|()| None),
            })
            .await
        }

        async fn sleep(alarm: &Alarm, deadline: Option<Instant>) {
            alarm.wait(deadline, sleep_until).await;
        }
    }
}
