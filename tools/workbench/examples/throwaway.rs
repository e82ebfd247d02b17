//! Starts a throwaway PostgreSQL server, prints its URL, and stops it when standard input ends.

use std::io::{self, Read};

fn main() -> io::Result<()> {
    let cluster = workbench::Cluster::start();
    println!("{}", cluster.url("postgres"));
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
