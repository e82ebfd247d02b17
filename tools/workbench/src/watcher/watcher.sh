# Owns one server: creates its directory, runs its programs, and removes everything when standard input ends, which is
# when the process that started this one has ended, in whatever way.
#
#   WATCHER=$(cat watcher.sh) sh -c 'eval "$WATCHER"' watcher DIRECTORY BINARIES
#
# Commands are read line by line from standard input, and each is answered by the line `done` on standard output.
# Programs run in the background, because the end of the input must be noticed at all times.

unset WATCHER
trap '' HUP INT TERM PIPE TSTP TTIN TTOU
exec 2>&1
cd / || exit 1
umask 077
PATH=${PATH:+$PATH:}/usr/bin:/bin
directory=$1
binaries=$2
pid_file=$directory/pid

mkdir "$directory" || exit 1
exec 2>/dev/null
echo done

# run LOG PROGRAM ARGUMENTS...
# While the program runs, or is about to, the file `pid` exists; from the start of the program on, it names it.
# Afterwards the file `status` has its exit status.
run() {
    log=$directory/$1
    shift
    rm -f "$directory/status"
    printf '' >"$pid_file"
    (
        (
            trap - HUP INT TERM PIPE TSTP TTIN TTOU
            exec "$@"
        ) </dev/null >>"$log" 2>&1 &
        echo $! >"$pid_file"
        wait $!
        echo $? >"$directory/status"
        rm -f "$pid_file"
    ) &
}

signals='CONT QUIT TERM'
while read -r command argument other; do
    case $command in
    create) run setup "$binaries/initdb" -D "$directory/data" -U postgres -A trust -E UTF8 --locale=C -N ;;
    copy) run setup "$binaries/pg_basebackup" -d "$argument" -D "$directory/data" -R -X stream -c fast -N ;;
    backup) run setup "$binaries/pg_basebackup" -d "$argument" -D "$directory/data" -X stream -c fast -N ;;
    upgrade)
        # The checksums of both servers must agree, and from 18 on, initdb enables them by default.
        run setup sh -c 'cd "$1" && unsums=
            "$2/initdb" --help | grep -q no-data-checksums && unsums=--no-data-checksums
            "$2/initdb" -D "$1/data" -U postgres -A trust -E UTF8 --locale=C -N $unsums &&
                "$2/pg_upgrade" -b "$3" -B "$2" -d "$4" -D "$1/data" -s "$1" -U postgres' \
            upgrade "$directory" "$binaries" "$argument" "$other"
        ;;
    serve) run log "$binaries/postgres" -D "$directory/data" ;;
    pool) run log "$binaries/pgbouncer" "$directory/pgbouncer.ini" ;;
    balance)
        # Only QUIT: a second kind of signal would interrupt the shutdown that the first one began.
        signals='CONT QUIT'
        run log setsid "$binaries/pgpool" -n -f "$directory/pgpool.conf" -F "$directory/none" -a "$directory/none"
        ;;
    store) run log "$binaries/etcd" --config-file "$directory/etcd.yml" ;;
    proxy) run log "$binaries/haproxy" -db -f "$directory/haproxy.cfg" ;;
    node)
        # KILL, so that Patroni does not fail over meanwhile. Its server is stopped below.
        signals=KILL
        run log setsid "$binaries/patroni" "$directory/patroni.yml"
        ;;
    signal) read -r pid <"$pid_file" && kill "-$argument" "$pid" ;;
    esac
    echo done
done

# Signals are repeated, because the first may come before the program has set up its handlers, or while it is
# suspended. QUIT is PostgreSQL's immediate shutdown, which takes at most five seconds; TERM is for other programs.
rounds=0
while [ -e "$pid_file" ] && [ $rounds -lt 500 ]; do
    rounds=$((rounds + 1))
    pid=
    read -r pid <"$pid_file"
    if [ -n "$pid" ] && [ $rounds -lt 400 ]; then
        for signal in $signals; do kill "-$signal" "$pid"; done
    elif [ -n "$pid" ]; then
        kill -KILL "$pid"
    fi
    sleep 0.02 || sleep 1
done

# A killed Patroni leaves its server running, and programs of its session, such as pg_rewind. A
# process that does not run in the data directory has reused the pid of a server that has ended.
if [ "$signals" = KILL ]; then
    family=$(ps -o pid= -s "$pid")
    # Unquoted: several pids.
    [ -n "$family" ] && kill -KILL $family
    read -r server <"$directory/data/postmaster.pid"
    rounds=0
    while [ "$(readlink "/proc/$server/cwd")" = "$directory/data" ] && [ $rounds -lt 500 ]; do
        rounds=$((rounds + 1))
        kill -QUIT "$server"
        sleep 0.02 || sleep 1
    done
fi

# A killed postmaster leaves a small System V shared memory segment, whose id is in line 7 of postmaster.pid.
segment=$(sed -n '7s/^ *[0-9][0-9]*  *\([0-9][0-9]*\) *$/\1/p' "$directory/data/postmaster.pid")
[ -n "$segment" ] && ipcrm -m "$segment"

# A killed pgpool-II leaves its pid file, the processes of its session, and their shared memory segments.
leader=$(tr -d '\0' <"$directory/pgpool.pid")
if [ -n "$leader" ]; then
    family=$(ps -o pid= -s "$leader")
    # Unquoted: several pids.
    kill -KILL $family
    ipcs -m -p | while read -r segment _ creator _; do
        case " $leader "$(echo $family)" " in
        *" $creator "*) ipcrm -m "$segment" ;;
        esac
    done
fi

rounds=0
until rm -rf "$directory" || [ $rounds -ge 50 ]; do
    rounds=$((rounds + 1))
    sleep 0.1 || sleep 1
done
