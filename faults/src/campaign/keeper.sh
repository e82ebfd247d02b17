# Ends the processes of a campaign and removes its directory when its standard input closes, which is when the campaign
# has ended, in whatever way. It makes the directory, and then reads `own PID` and `disown PID` line by line.
#
#   KEEPER=$(cat keeper.sh) sh -c 'eval "$KEEPER"' keeper DIRECTORY

unset KEEPER
trap '' HUP INT TERM PIPE TSTP TTIN TTOU
cd / || exit 1
mkdir -m 755 "$1" || exit 1
echo made
owned=' '

while read -r command pid; do
    case $command in
    own) owned="$owned$pid " ;;
    disown) owned="${owned%% "$pid" *} ${owned#* "$pid" }" ;;
    esac
done

# Stopped processes, too: nothing else wakes them.
for pid in $owned; do
    kill -KILL "$pid" 2>/dev/null
done
rm -rf "$1"
