//! `interlock run`, in the bare environment of cron.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use workbench::{Cluster, Database, StopMode};

use crate::support::*;

#[test]
fn the_status_is_that_of_the_command() {
    let database = Database::new();
    let url = &database.url();
    for (script, expected) in [
        ("true", 0),
        ("exit 7", 7),
        ("kill -9 $$", 137),
        ("kill $$", 143),
    ] {
        assert_eq!(
            status(&mut run(url, "x", script)),
            Some(expected),
            "{script}"
        );
    }
    assert_eq!(
        status(&mut interlock(url, "run x -- /no/such/program")),
        Some(127)
    );
    assert_eq!(status(&mut interlock(url, "run x -- /dev/null")), Some(126));
    assert_eq!(Session::of(&database).locks(true), 0);
}

#[test]
fn a_set_up_that_cannot_work_has_a_status_of_its_own() {
    let database = Database::new();
    let url = &database.url();
    assert_eq!(status(&mut run("", "x", "true")), Some(78));
    assert_eq!(
        status(run(url, "x", "true").env_remove("DATABASE_URL")),
        Some(78)
    );
    assert_eq!(
        status(&mut run("postgres:///x?host=/no/such/place", "x", "true")),
        Some(69)
    );
    assert_eq!(
        status(&mut run("host=/no/such/place", "x", "true")),
        Some(69)
    );
    assert_eq!(status(&mut run(url, "x --lease 30s", "true")), Some(78));
    for wrong in [
        "x --wait soon",
        "x --slots 2",
        "x --lease 30s --shared",
        "x -E 256",
    ] {
        assert_eq!(status(&mut run(url, wrong, "true")), Some(2), "{wrong}");
    }
    assert_eq!(
        status(interlock(url, "run").args(["", "--", "true"])),
        Some(2)
    );
    assert_eq!(status(&mut interlock(url, "run x")), Some(2));
}

#[test]
fn a_url_that_cannot_be_parsed_is_a_wrong_set_up() {
    for unreadable in [
        "postgres://x?nonsense=1",
        "nonsense",
        "host='x",
        "postgres://[x",
    ] {
        let (status, text) = printed(&mut run(unreadable, "x --wait 1h", "true"));
        assert_eq!(status, Some(78), "{text}");
        assert!(text.contains("DATABASE_URL"), "{text}");
    }
}

#[test]
fn a_long_name_prints_no_notice() {
    let database = Database::new();
    let url = &database.url();
    let name = "\u{e4}".repeat(500);
    assert_eq!(
        printed(&mut run(url, &name, "true")),
        (Some(0), String::new())
    );
    assert_eq!(status(&mut run(url, &"x".repeat(20_000), "true")), Some(2));
}

#[test]
fn with_a_busy_lock_nothing_runs_and_the_status_says_so() {
    let database = Database::new();
    let url = &database.url();
    let mark = Mark::new("busy");
    let script = format!("touch {}", mark.0.display());
    Session::of(&database).take("other");
    let mut holder = Session::of(&database);
    holder.take("nightly report");
    let busy = |line: &[&str]| {
        let mut command = interlock(url, "run");
        status(
            command
                .args(line)
                .args(["nightly report", "--", "sh", "-c", &script]),
        )
    };
    assert_eq!(busy(&[]), Some(73));
    assert_eq!(busy(&["-E", "99"]), Some(99));
    assert_eq!(busy(&["--conflict-exit-code", "0"]), Some(0));
    assert_eq!(busy(&["--wait", "1500ms"]), Some(73));
    assert_eq!(busy(&["--shared"]), Some(73));
    assert!(!mark.0.exists());
    holder.release("nightly report");
    assert_eq!(busy(&[]), Some(0));
    assert!(mark.0.exists());
}

#[test]
fn the_holder_of_a_busy_lock_is_named_unless_quiet_is_given() {
    let database = installed();
    let url = &database.url_with("application_name", "web-3");
    let mut holder = Session(workbench::Endpoint::new(url).connect());
    holder.take("x");
    let url = &database.url();
    let (status, text) = printed(&mut run(url, "x", "true"));
    assert_eq!(status, Some(73));
    assert_eq!(text.lines().count(), 1, "{text}");
    let session = format!("session {} of ", holder.pid());
    for named in ["interlock: x is busy: web-3 ", &session, "connected since "] {
        assert!(text.contains(named), "{named} is not in {text}");
    }
    for quiet in ["x -q", "x --quiet --wait 1500ms"] {
        assert_eq!(
            printed(&mut run(url, quiet, "true")),
            (Some(73), String::new())
        );
    }
    holder.sql("SELECT resource_control.claim_service_request('y', 1, '1 day', 'web-4')");
    let (status, text) = printed(&mut run(url, "y --lease 30s", "true"));
    assert_eq!(status, Some(73));
    assert!(text.contains("y is busy: web-4 has slot 0"), "{text}");
}

#[test]
fn a_role_with_one_connection_may_run() {
    let database = Database::new();
    let role = format!("interlock_cli_single_{}", std::process::id());
    let mut session = Session::of(&database);
    session.sql(&format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT 1"));
    let (status, text) = printed(&mut run(&database.url_with("user", &role), "x", "exit 5"));
    eventually("the session of the role has ended", || {
        session.number(&format!(
            "SELECT count(*) FROM pg_stat_activity WHERE usename = '{role}'"
        )) == 0
    });
    session.sql(&format!("DROP ROLE {role}"));
    assert_eq!(status, Some(5), "{text}");
    assert!(text.contains("pooler"), "{text}");
}

#[test]
fn a_wait_ends_when_the_lock_is_free() {
    let database = Database::new();
    let mut holder = Session::of(&database);
    holder.take("x");
    let mut running = Running::start(&mut run(&database.url(), "x --wait 10m", "echo held"));
    eventually("the command waits", || holder.locks(false) == 1);
    holder.release("x");
    assert_eq!(running.line(), "held");
    assert_eq!(running.status(), Some(0));
}

#[test]
fn a_signal_ends_a_wait_and_nothing_stays_behind() {
    let database = installed();
    let url = &database.url();
    let mut holder = Session::of(&database);
    holder.take("x");
    holder.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
    for line in ["x --wait 10m", "x --wait 10m --lease 1h"] {
        let sessions = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'interlock x'";
        eventually("the sessions of the command before have ended", || {
            holder.number(sessions) == 0
        });
        let running = &mut Running::start(&mut run(url, line, "true"));
        eventually("the command waits", || holder.number(sessions) > 0);
        running.signal("TERM");
        assert_eq!(running.status(), Some(143));
    }
    assert_eq!(
        holder.number("SELECT count(*) FROM resource_control.service_request"),
        1
    );
    eventually("the command waits no longer", || holder.locks(false) == 0);
}

#[test]
fn an_outage_is_reported_before_the_wait_for_its_end() {
    let away = run("host=/no/such/place", "x --wait 10m", "true")
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    let mut away = away.unwrap();
    let mut lines = BufReader::new(away.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("/no/such/place"));
    signal(away.id(), "TERM");
    assert_eq!(away.wait().unwrap().code(), Some(143));
}

/// A pool alone would go on for ten seconds at least. A slow round proves nothing.
#[test]
fn the_wait_for_the_end_of_an_outage_is_over_in_time() {
    let is_in_time = |_| {
        let began = Instant::now();
        let mut waits = run("postgres://127.0.0.1:1/x", "x --wait 1s", "true");
        assert_eq!(Running::start(&mut waits).status(), Some(69));
        began.elapsed() < Duration::from_secs(10)
    };
    assert!((0..5).any(is_in_time));
}

#[test]
fn a_signal_ends_the_program_while_it_connects() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "postgres://{}/x?user=x&sslmode=disable",
        listener.local_addr().unwrap()
    );
    let mut running = Running::start(run(&url, "x", "true").env("PGCONNECT_TIMEOUT", "0"));
    let _connecting = listener.accept().unwrap();
    running.signal("INT");
    assert_eq!(running.status(), Some(130));
}

#[test]
fn several_commands_share_a_lock() {
    let database = Database::new();
    let url = &database.url();
    let mut first = Running::start(&mut run(url, "x --shared", UNTIL_TERM));
    assert_eq!(first.line(), "ready");
    assert_eq!(status(&mut run(url, "x --shared", "true")), Some(0));
    assert_eq!(status(&mut run(url, "x", "true")), Some(73));
    first.signal("TERM");
    assert_eq!(first.status(), Some(9));
}

#[test]
fn the_command_knows_the_token_if_the_schema_is_installed() {
    let database = Database::new();
    let url = &database.url();
    let script = "echo ${INTERLOCK_TOKEN-none}";
    let token = |line| {
        let printed = printed(run(url, line, script).env("INTERLOCK_TOKEN", "of another one"));
        (printed.0 == Some(0))
            .then(|| printed.1.trim().to_owned())
            .unwrap()
    };
    assert_eq!(token("x"), "none");
    diesel_interlock::migrations::install(&database.pool(1)).unwrap();
    let number = |line| token(line).parse::<i64>().unwrap();
    assert!(number("x") < number("x"));
    assert!(number("x --lease 30s") < number("x --lease 30s"));
}

#[test]
fn a_permit_holds_its_slot_until_the_command_has_ended() {
    let database = installed();
    let url = &database.url();
    let mut session = Session::of(&database);
    let two = "x --lease 30s --slots 2";
    let mut first = Running::start(&mut run(url, two, UNTIL_TERM));
    assert_eq!(first.line(), "ready");
    assert_eq!(status(&mut run(url, "x --lease 30s", "true")), Some(73));
    assert_eq!(status(&mut run(url, two, "exit 3")), Some(3));
    let in_flight = "SELECT count(*) FROM resource_control.slot_in_flight WHERE service = 'x'";
    assert_eq!(session.number(in_flight), 1);
    first.signal("TERM");
    assert_eq!(first.status(), Some(9));
    assert_eq!(session.number(in_flight), 0);
    assert_eq!(session.locks(true), 0);
}

#[test]
fn signals_reach_the_whole_group() {
    let database = Database::new();
    let script = "sleep 1000 & echo $!; wait";
    let mut running = Running::start(&mut run(&database.url(), "x", script));
    let sleep = running.line();
    assert!(is_alive(&sleep));
    running.signal("TERM");
    assert_eq!(running.status(), Some(143));
    eventually("the child of the command has ended, too", || {
        !is_alive(&sleep)
    });
    for (name, number) in [("HUP", 129), ("INT", 130), ("USR1", 138)] {
        let script = "echo ready; exec sleep 1000";
        let mut running = Running::start(&mut run(&database.url(), "x", script));
        assert_eq!(running.line(), "ready");
        running.signal(name);
        assert_eq!(running.status(), Some(number));
    }
}

#[test]
fn the_lock_is_held_until_the_command_has_ended() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let mark = Mark::new("reaped");
    let script = format!(
        "trap 'echo asked; while [ ! -e {} ]; do sleep 0.05; done; exit 9' TERM; echo ready; while :; do sleep 0.05; done",
        mark.0.display()
    );
    let mut running = Running::start(&mut run(&database.url(), "x", &script));
    assert_eq!(running.line(), "ready");
    running.signal("TERM");
    assert_eq!(running.line(), "asked");
    assert_eq!(session.locks(true), 1);
    File::create(&mark.0).unwrap();
    assert_eq!(running.status(), Some(9));
    assert_eq!(session.locks(true), 0);
}

#[test]
#[cfg(target_os = "linux")]
fn the_command_ends_with_an_interlock_that_is_killed() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let script = "trap '' HUP INT TERM; echo $$; while :; do sleep 0.05; done";
    let mut running = Running::start(&mut run(&database.url(), "x", script));
    let command = running.line();
    assert!(is_alive(&command));
    running.child().kill().unwrap();
    eventually("the command has ended", || !is_alive(&command));
    eventually("the lock is free", || session.locks(true) == 0);
}

#[test]
fn a_lost_lock_ends_the_command() {
    let database = Database::new();
    let mut session = Session::of(&database);
    // The program cannot print its message, as on a full disk.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let script = "trap 'echo asked; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(run(&database.url(), "x", script).stderr(full));
    assert_eq!(running.line(), "ready");
    session.end_holders();
    assert_eq!(running.line(), "asked");
    assert_eq!(running.status(), Some(75));
}

#[test]
fn a_lost_lock_ends_the_command_also_if_standard_error_is_blocked() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let (_reader, mut writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[b' '; 1024]).is_ok() {}
    writer.set_nonblocking(false).unwrap();
    let script =
        "exec 2>/dev/null; trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done";
    let mut command = run(&database.url(), "x", script);
    let mut running = Running::start(command.stderr(OwnedFd::from(writer)));
    assert_eq!(running.line(), "ready");
    session.end_holders();
    assert_eq!(running.line(), "asked");
    assert_eq!(running.status(), Some(75));
}

#[test]
fn a_loss_ends_a_command_that_has_left_its_group() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let script = "$| = 1; setpgrp(0, getpgrp(getppid())) or die; print qq($$\n); sleep 1000";
    let mut command = interlock(&database.url(), "run x -- perl -e");
    let mut running = Running::start(command.arg(script));
    let left = running.line();
    assert!(is_alive(&left));
    session.end_holders();
    assert_eq!(running.status(), Some(75));
    assert!(!is_alive(&left));
}

#[test]
fn with_sigchld_ignored_no_command_is_started() {
    let database = Database::new();
    let mut shell = std::process::Command::new("perl");
    shell.args(["-e", "$SIG{CHLD} = 'IGNORE'; exec @ARGV"]);
    shell.arg(env!("CARGO_BIN_EXE_interlock"));
    shell.args(["run", "x", "--", "echo", "ran"]);
    let (status, text) = printed(shell.env("DATABASE_URL", database.url()));
    assert_eq!(status, Some(71), "{text}");
    assert!(text.contains("SIGCHLD is ignored"), "{text}");
}

#[test]
fn a_loss_also_ends_processes_that_ignore_sigterm_or_were_left_running() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let script = "(trap '' TERM; while :; do sleep 0.05; done) & echo $!; exec sleep 1000";
    let mut running = Running::start(&mut run(&database.url(), "x", script));
    let left = running.line();
    session.end_holders();
    assert_eq!(running.status(), Some(75));
    eventually("the process that was left running has ended", || {
        !is_alive(&left)
    });
}

#[test]
fn a_restart_of_the_server_is_a_loss() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut running = Running::start(&mut run(&database.url(), "x", UNTIL_TERM));
    assert_eq!(running.line(), "ready");
    cluster.restart(StopMode::Fast);
    assert_eq!(running.status(), Some(75));
}

#[test]
fn a_loss_names_the_lock_and_its_consequence() {
    let database = Database::new();
    let mut session = Session::of(&database);
    let mut command = run(&database.url(), "nightly", UNTIL_TERM);
    let error = Mark::new("loss");
    let mut running = Running::start(command.stderr(File::create(&error.0).unwrap()));
    assert_eq!(running.line(), "ready");
    session.end_holders();
    assert_eq!(running.status(), Some(75));
    let said = fs::read_to_string(&error.0).unwrap();
    for named in ["nightly: the lock ", &id("nightly"), "the command is ended"] {
        assert!(said.contains(named), "{said}");
    }
}

#[test]
fn a_loss_that_was_not_noticed_is_reported_at_the_end() {
    let database = Database::new();
    let url = database.url();
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let mut command = interlock(&url, "run x -- psql -qAt -c");
    let (status, _) = printed(command.arg(kill).arg(&url));
    assert_eq!(status, Some(75));
}

#[test]
fn a_loss_that_is_noticed_only_after_the_command_is_reported_too() {
    let database = Database::new();
    let mut session = Session::of(&database);
    for round in 0..4 {
        let mark = Mark::new(&format!("seen-{round}"));
        let script = format!(
            "echo $$; while [ ! -e {} ]; do sleep 0.05; done",
            mark.0.display()
        );
        let mut running = Running::start(&mut run(&database.url(), "x", &script));
        let command = running.line();
        running.signal("STOP");
        session.end_holders();
        fs::write(&mark.0, "").unwrap();
        eventually("the command has ended", || !is_alive(&command));
        running.signal("CONT");
        assert_eq!(running.status(), Some(75));
    }
}

#[test]
fn an_outage_during_a_wait_is_not_a_busy_lock() {
    // A slow server may stop only after the wait, and then the lock is busy, so rounds are
    // repeated.
    for _ in 0..20 {
        let cluster = Cluster::start();
        let database = cluster.database();
        let mut holder = Session::of(&database);
        holder.take("x");
        let mut running = Running::start(&mut run(&database.url(), "x --wait 5s", "true"));
        eventually("the command waits", || {
            holder.locks(false) == 1 || running.child().try_wait().unwrap().is_some()
        });
        cluster.stop(StopMode::Fast);
        let status = running.status();
        if status == Some(69) {
            return;
        }
        assert_eq!(status, Some(73));
    }
    panic!("the lock was busy in every round");
}

#[test]
fn completing_the_request_elsewhere_ends_the_command() {
    let database = installed();
    let url = &database.url();
    let mut running = Running::start(&mut run(url, "x --lease 12s", UNTIL_TERM));
    assert_eq!(running.line(), "ready");
    let id = Session::of(&database).number("SELECT id FROM resource_control.slot_in_flight");
    assert_eq!(
        status(&mut interlock(url, &format!("kill x --slot {id} --yes"))),
        Some(0)
    );
    assert_eq!(running.status(), Some(75));
}

#[test]
fn closed_standard_streams_and_full_disks_do_not_matter() {
    let database = Database::new();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "\"$0\" run x -- sh -c 'exit 5' <&- >&- 2>&-"]);
    shell
        .arg(env!("CARGO_BIN_EXE_interlock"))
        .env("DATABASE_URL", database.url());
    assert_eq!(shell.status().unwrap().code(), Some(5));
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let mut command = run(&database.url(), "x", "echo more; exit 6");
    assert_eq!(
        command
            .stdout(full())
            .stderr(full())
            .status()
            .unwrap()
            .code(),
        Some(6)
    );
}

#[test]
fn under_nohup_a_hangup_does_nothing() {
    let database = Database::new();
    let (url, mark) = (database.url(), Mark::new("nohup"));
    let mut command = std::process::Command::new("sh");
    let wait = format!(
        "echo ready; while [ ! -e {} ]; do sleep 0.05; done; exit 4",
        mark.0.display()
    );
    command.args(["-c", "trap '' HUP; exec \"$0\" run x -- sh -c \"$1\""]);
    command
        .arg(env!("CARGO_BIN_EXE_interlock"))
        .arg(wait)
        .env("DATABASE_URL", url);
    let mut running = Running::start(&mut command);
    assert_eq!(running.line(), "ready");
    running.signal("HUP");
    fs::write(&mark.0, "").unwrap();
    assert_eq!(running.status(), Some(4));
}

#[test]
fn a_long_wait_names_the_holder_and_keeps_one_session() {
    let database = Database::new();
    let url = &database.url();
    let mut holder = Session::of(&database);
    holder.take("x");
    let mut waiting = Speaking::start(&mut run(url, "x --wait 10m", "true"));
    let message = waiting.message();
    let pid = format!("session {}", holder.pid());
    assert!(message.contains("x waits: "), "{message}");
    assert!(message.contains(&pid), "{message}");
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'interlock x'";
    eventually("the command has one session", || {
        holder.number(sessions) == 1
    });
    holder.release("x");
    assert_eq!(waiting.status(), Some(0));
}

#[test]
fn a_commit_that_waits_for_a_standby_is_explained() {
    let cluster = Cluster::start();
    // The database of the cluster, because dropping a database of the test would wait for the
    // standby, too.
    let database = cluster.endpoint("postgres");
    diesel_interlock::migrations::install(&database.pool(1)).unwrap();
    let mut session = Session(database.connect());
    let mut set = |names: &str| {
        session.sql(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        session.reload();
    };
    set("ANY 1 (*)");
    let mut waiting = Speaking::start(&mut run(&database.url(), "x --lease 1h --wait 10m", "true"));
    let message = waiting.message();
    assert!(
        message.contains("waits for a synchronous standby"),
        "{message}"
    );
    set("");
    assert_eq!(waiting.status(), Some(0));
}

#[test]
fn the_variables_of_libpq_say_which_database_to_use() {
    let database = Database::new();
    let url = database.url();
    let (_, parameters) = url.split_once('?').unwrap();
    let mut parameters: Vec<_> = parameters
        .split('&')
        .map(|one| one.split_once('=').unwrap())
        .map(|(name, value)| (name, value.replace("%2F", "/").replace("%2f", "/")))
        .collect();
    parameters.push(("dbname", database.name().to_owned()));
    let variables: Vec<_> = parameters
        .iter()
        .map(|(name, value)| match *name {
            "dbname" => ("PGDATABASE".to_owned(), value),
            name => (format!("PG{}", name.to_uppercase()), value),
        })
        .collect();
    let mut admin = Session::of(&database);
    admin.take("x");
    let holds = |command: &mut std::process::Command| {
        let (status, text) = printed(command);
        assert_eq!(status, Some(0), "{text}");
        assert!(text.contains(&id("x")), "{text}");
    };
    holds(
        interlock("", "ps")
            .env_remove("DATABASE_URL")
            .envs(variables.clone()),
    );
    holds(interlock("postgres://", "ps").envs(variables.clone()));
    let file = Mark::new("service");
    let lines: Vec<_> = parameters
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect();
    fs::write(&file.0, format!("[here]\n{}", lines.concat())).unwrap();
    let mut by_service = interlock("", "ps");
    by_service
        .env("PGSERVICE", "here")
        .env("PGSERVICEFILE", &file.0);
    holds(&mut by_service);
}

#[test]
fn for_an_unknown_option_no_misleading_advice_is_printed() {
    let (status, text) = printed(&mut interlock("", "run x --wat"));
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("--wat"), "{text}");
    assert!(!text.contains("-- --wat"), "{text}");
    let (_, page) = printed(&mut interlock("", "man"));
    assert!(page.contains("INTERLOCK RUN"), "{page}");
    assert!(!page.contains(r"interlock\-run"), "{page}");
}
