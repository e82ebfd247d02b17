# Ends the processes of a campaign and removes its directory when its standard input closes, which is when the campaign
# has ended, also by a kill. It makes the directory, and then reads `add PID` and `remove PID` line by line.
#
#   SCRIPT=$(cat cleanup.sh) sh -c 'eval "$SCRIPT"' cleanup DIRECTORY

unset SCRIPT
trap '' HUP INT TERM PIPE TSTP TTIN TTOU
cd / || exit 1
mkdir -m 755 "$1" || exit 1
echo made
pids=' '

while read -r command pid; do
    case $command in
    add) pids="$pids$pid " ;;
    remove) pids="${pids%% "$pid" *} ${pids#* "$pid" }" ;;
    esac
done

# Stopped processes, too: nothing else wakes them.
for pid in $pids; do
    kill -KILL "$pid" 2>/dev/null
done
rm -rf "$1"
