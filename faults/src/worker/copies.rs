//! COPY on a session that holds a lock: read to its end or not, written whole, given up, or ended by a panic.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::pg::{CopyFormat, PgConnection};
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use super::{Hand, panic_deliberately};

diesel::table! {
    faults.copied (number) {
        number -> Integer,
        text -> Text,
    }
}

pub(super) fn copy_to(hand: &mut Hand<'_>, conn: &mut PgConnection) {
    let copy = diesel::copy_to(copied::table).with_format(CopyFormat::Text);
    let Ok(mut rows) = copy.load_raw(conn) else {
        return;
    };
    if hand.random.one_in(2) {
        let _ = io::copy(&mut rows, &mut io::sink());
    }
}

pub(super) fn copy_from(hand: &mut Hand<'_>, conn: &mut PgConnection) {
    let ending = hand.random.below(3);
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
