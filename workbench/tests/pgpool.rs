//! A pooler that sends reads to a standby. Needs pgpool-II: `cargo test -p workbench --test pgpool`.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Text;
use workbench::{Cluster, Pgpool};

fn text(conn: &mut PgConnection, expression: &str) -> String {
    let value = diesel::select(sql::<Text>(&format!("({expression})::text"))).get_result(conn);
    value.unwrap()
}

/// The directory of the server that answers, asked by stable functions only.
const SERVER: &str = "current_setting('data_directory')";

#[test]
fn reads_go_to_the_standby_and_volatile_functions_to_the_primary() {
    let primary = Cluster::start();
    let database = primary.database();
    let standby = primary.standby();
    let pooler = Pgpool::in_front_of(&database, &standby.endpoint("postgres"));
    let conn = &mut pooler.connect();
    let data = |cluster: &Cluster| cluster.directory().join("data").display().to_string();
    for _ in 0..3 {
        assert_eq!(text(conn, SERVER), data(&standby));
        let volatile = format!("CASE WHEN clock_timestamp() IS NOT NULL THEN {SERVER} END");
        assert_eq!(text(conn, &volatile), data(&primary));
    }
    let begun = conn.transaction(|conn| {
        diesel::sql_query("CREATE TABLE written ()").execute(conn)?;
        QueryResult::Ok(text(conn, SERVER))
    });
    assert_eq!(begun.unwrap(), data(&primary));
}

/// Names the way in which the process ends that runs a part of a test.
const END: &str = "WORKBENCH_TEST_END";

#[test]
fn a_process_that_ends_in_any_way_leaves_nothing_behind() {
    if let Ok(end) = env::var(END) {
        return serve_and(&end);
    }
    for end in ["return", "panic", "abort", "kill the pooler"] {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("a_process_that_ends_in_any_way_leaves_nothing_behind")
            .env(END, end)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Open until the process ends, which fails if it cannot print.
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let said = (&mut output).lines().map_while(Result::ok);
        let said: Vec<_> = said
            .filter_map(|line| Some(line.split_once("said: ")?.1.to_owned()))
            .take(2)
            .collect();
        let [directory, leader] = &said[..] else {
            panic!("{end}: the pooler has not started: {said:?}");
        };
        // One segment is its own, and one that of the process that takes commands.
        let mut processes = Vec::new();
        until("all its processes have started", || {
            processes = session(leader);
            processes.len() > 60 && segments(&processes) > 1
        });

        drop(child.stdin.take());
        assert_eq!(
            child.wait().unwrap().success(),
            end != "panic" && end != "abort"
        );
        until("the directory has gone", || !Path::new(directory).exists());
        until("the processes have gone", || session(leader).is_empty());
        assert_eq!(segments(&processes), 0, "{end}");
    }
}

fn serve_and(end: &str) {
    let primary = Cluster::start();
    let standby = primary.standby();
    let pooler = Pgpool::in_front_of(&primary.endpoint("postgres"), &standby.endpoint("postgres"));
    let mut busy = pooler.connect();
    thread::spawn(move || diesel::sql_query("SELECT pg_sleep(600)").execute(&mut busy));
    let leader = fs::read(pooler.directory().join("pgpool.pid")).unwrap();
    let leader = String::from_utf8_lossy(&leader);
    let leader = leader.trim_matches(['\0', '\n']);
    println!("said: {}\nsaid: {leader}", pooler.directory().display());
    let _ = io::stdin().read_line(&mut String::new());
    match end {
        "panic" => panic!("as asked"),
        "abort" => std::process::abort(),
        "kill the pooler" => assert!(
            Command::new("kill")
                .args(["-KILL", leader])
                .status()
                .unwrap()
                .success()
        ),
        _ => {}
    }
}

/// The processes of the session that a process leads.
fn session(leader: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let stats = processes.map(|process| process.path().join("stat"));
    stats
        .filter_map(|path: PathBuf| {
            let stat = fs::read_to_string(path).ok()?;
            let (name, rest) = stat.rsplit_once(") ")?;
            let of = rest.split_whitespace().nth(3)?;
            (of == leader).then(|| name.split_once(' ').map(|(pid, _)| pid.to_owned()))?
        })
        .collect()
}

/// How many segments of shared memory these processes made.
fn segments(creators: &[String]) -> usize {
    let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap();
    let creator = |row: &str| row.split_whitespace().nth(4).map(str::to_owned);
    let made = segments.lines().filter_map(creator);
    made.filter(|creator| creators.contains(creator)).count()
}

/// Waits until `happened`, and panics if that takes half a minute.
#[track_caller]
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
