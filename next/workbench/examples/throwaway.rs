//! Starts a throwaway PostgreSQL server, prints the connection string of an empty database on it, and
//! keeps both until its standard input ends. What `examples/run` starts its applications on.

use std::io::{self, Read};

fn main() -> io::Result<()> {
    let database = workbench::Cluster::start();
    println!("{}", database.url("postgres"));
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
