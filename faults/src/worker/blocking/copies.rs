//! COPY on a session that holds a lock: read to its end or in part, written completely, abandoned, or ended by a panic.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::pg::{CopyFormat, PgConnection};
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use super::WorkerThread;
use crate::chance::Chance;
use crate::fault::Fault;
use crate::worker::instructions::inflicts;
use crate::worker::panic_deliberately;

diesel::table! {
    faults.copied (number) {
        number -> Integer,
        text -> Text,
    }
}

/// Copies if that fault is due. Returns whether it was.
pub(super) fn inflict(worker: &mut WorkerThread<'_>, conn: &mut PgConnection) -> bool {
    if inflicts(Fault::CopyTo) {
        copy_to(worker, conn);
    } else if inflicts(Fault::CopyFrom) {
        copy_from(worker, conn);
    } else {
        return false;
    }
    true
}

fn copy_to(worker: &mut WorkerThread<'_>, conn: &mut PgConnection) {
    let copy = diesel::copy_to(copied::table).with_format(CopyFormat::Text);
    let Ok(mut rows) = copy.load_raw(conn) else {
        return;
    };
    if worker.random.one_in(2) {
        let _ = io::copy(&mut rows, &mut io::sink());
    }
}

fn copy_from(worker: &mut WorkerThread<'_>, conn: &mut PgConnection) {
    let ending = worker.random.u64(..3);
    let copy = diesel::copy_from(copied::table)
        .from_raw_data(copied::table, move |rows| -> Result<(), DieselError> {
            writeln!(rows, "1\tcopied")
                .map_err(|error| DieselError::SerializationError(Box::new(error)))?;
            match ending {
                0 => Ok(()),
                1 => Err(DieselError::RollbackTransaction),
                _ => panic_deliberately(),
            }
        })
        .with_format(CopyFormat::Text);
    let _ = catch_unwind(AssertUnwindSafe(|| copy.execute(conn)));
}
