# Words: the temporary folder, programs mount and sleep, folders to overlay, --, and a command. It runs as process 1 of
# a namespace, waits a moment for what the command leaves in the background, and takes the rest with it.
root=$1 mount=$2 sleep=$3 number=0 overlaid=
shift 3
while [ "$1" != -- ]; do
    number=$((number + 1))
    layers=lowerdir=$1,upperdir=$root/upper/$number,workdir=$root/work/$number
    "$mount" -t overlay overlay -o "$layers" "$1" 2> /dev/null && overlaid="$overlaid:$1:"
    shift
done
shift
"$mount" -t proc -o ro proc /proc && "$mount" --bind "$root" "$root" || exit 97
for pass in seal check; do
    while read -r _ target _ options _; do
        target=$(printf %b "$target")
        case $target in /proc | /proc/*) continue ;; esac
        case $overlaid:$root: in *":$target:"*) continue ;; esac
        if [ $pass = seal ]; then
            "$mount" -o remount,bind,ro "$target" 2> /dev/null
        else  # one mount may hide another, as often of /dev/shm
            case $target:,$options, in /dev*) ;; *,rw,*) exit 97 ;; esac
        fi
    done < /proc/self/mounts
done
cd "$root/run" || exit 97
"$@"
status=$? number=0
while [ $number -lt 50 ]; do
    set -- /proc/[0-9]*
    [ $# -gt 1 ] || break
    "$sleep" 0.01
    number=$((number + 1))
done
exit $status
