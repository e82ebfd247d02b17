//! A program of Diesel and r2d2 alone, for `scripts/bench size`.

use std::error::Error;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = Pool::new(ConnectionManager::<PgConnection>::new(url))?;
    diesel::sql_query("SELECT 1").execute(&mut pool.get()?)?;
    Ok(())
}
