//! Poolers that crash, reload their configuration, and pause.

use workbench::PoolMode;

use super::Injector;
use crate::chance::Chance;
use crate::fault::{Fault, POOLERS};

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&POOLERS, |injector, kind| {
        let mode = match kind {
            Fault::KilledSessionPooler => PoolMode::Session,
            Fault::KilledTransactionPooler => PoolMode::Transaction,
            _ if injector.random.one_in(2) => PoolMode::Session,
            _ => PoolMode::Transaction,
        };
        let workers = injector.workers;
        match kind {
            Fault::ReloadedPooler => workers.pooler(mode).reload(),
            Fault::PausedPooler => {
                workers.pooler(mode).pause();
                injector.pause(100, 800);
                workers.pooler(mode).resume();
            }
            _ => workers.pooler(mode).crash(),
        }
        injector.log.fault(kind, workers.behind(mode));
        injector.await_turn(900);
    });
}
