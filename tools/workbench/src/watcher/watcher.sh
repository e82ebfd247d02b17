# Owns one server: makes its directory, runs its programs, and removes everything when its standard input closes,
# which is when the process that started it has ended, in whatever way.
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
        # From 18 on, a new server has checksums unless it is told otherwise, and they must agree.
        run setup sh -c 'cd "$1" && unsums=
            "$2/initdb" --help | grep -q no-data-checksums && unsums=--no-data-checksums
            "$2/initdb" -D "$1/data" -U postgres -A trust -E UTF8 --locale=C -N $unsums &&
                "$2/pg_upgrade" -b "$3" -B "$2" -d "$4" -D "$1/data" -s "$1" -U postgres' \
            upgrade "$directory" "$binaries" "$argument" "$other"
        ;;
    serve) run log "$binaries/postgres" -D "$directory/data" ;;
    pool) run log "$binaries/pgbouncer" "$directory/pgbouncer.ini" ;;
    balance)
        # A second kind of signal keeps it from ending by the first.
        signals='CONT QUIT'
        run log setsid "$binaries/pgpool" -n -f "$directory/pgpool.conf" -F "$directory/none" -a "$directory/none"
        ;;
    store) run log "$binaries/etcd" --config-file "$directory/etcd.yml" ;;
    proxy) run log "$binaries/haproxy" -db -f "$directory/haproxy.cfg" ;;
    node)
        # Its server is ended below, and nothing is to fail over meanwhile.
        signals=KILL
        run log setsid "$binaries/patroni" "$directory/patroni.yml"
        ;;
    signal) read -r pid <"$pid_file" && kill "-$argument" "$pid" ;;
    esac
    echo done
done

# The first signals may come before the program has set up its handlers, or while it is suspended: so they are
# repeated. QUIT is PostgreSQL's immediate shutdown, which takes it at most five seconds; TERM is for the others.
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

# Patroni that was killed leaves its server, and programs such as pg_rewind, which are of its
# session. A process that is not in the directory of the data has got the number of a server that
# has ended.
if [ "$signals" = KILL ]; then
    family=$(ps -o pid= -s "$pid")
    # Without quotes, because these are words.
    [ -n "$family" ] && kill -KILL $family
    read -r server <"$directory/data/postmaster.pid"
    rounds=0
    while [ "$(readlink "/proc/$server/cwd")" = "$directory/data" ] && [ $rounds -lt 500 ]; do
        rounds=$((rounds + 1))
        kill -QUIT "$server"
        sleep 0.02 || sleep 1
    done
fi

# A postmaster that was killed leaves a System V shared memory segment of a few bytes, named by line 7 of its file.
segment=$(sed -n '7s/^ *[0-9][0-9]*  *\([0-9][0-9]*\) *$/\1/p' "$directory/data/postmaster.pid")
[ -n "$segment" ] && ipcrm -m "$segment"

# pgpool-II that was killed leaves the file of its pid, its processes, which are of its session, and their segments.
leader=$(tr -d '\0' <"$directory/pgpool.pid")
if [ -n "$leader" ]; then
    family=$(ps -o pid= -s "$leader")
    # Without quotes, because these are words.
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
