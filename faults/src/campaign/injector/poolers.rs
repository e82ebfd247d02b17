//! Poolers that crash, reload their configuration, and pause.

use workbench::PoolMode;

use super::Means;
use crate::chance::Chance;
use crate::fault::{Fault, POOLERS};

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&POOLERS, |means, kind| {
        let mode = match kind {
            Fault::KilledSessionPooler => PoolMode::Session,
            Fault::KilledTransactionPooler => PoolMode::Transaction,
            _ if means.random.one_in(2) => PoolMode::Session,
            _ => PoolMode::Transaction,
        };
        let crew = means.crew;
        match kind {
            Fault::ReloadedPooler => crew.pooler(mode).reload(),
            Fault::PausedPooler => {
                crew.pooler(mode).pause();
                means.pause(100, 800);
                crew.pooler(mode).resume();
            }
            _ => crew.pooler(mode).crash(),
        }
        means.ledger.fault(kind, crew.behind(mode));
        means.await_turn(900);
    });
}
