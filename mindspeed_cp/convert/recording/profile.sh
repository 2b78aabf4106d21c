# Read by every bash before its script: PATH stays what it is here, and a program with a path is recorded, too.
set -o functrace
command_not_found_handle() {
    case $1 in nvidia-smi|npu-smi|rocm-smi|ip|ifconfig) return 127 ;; esac
    "@BIN@/.record" "$@"
}
__recorder_guard() {
    PATH=@BIN@
    local words word base
    read -r -a words <<< "$BASH_COMMAND"
    for word in "${words[@]:0:8}"; do
        case $word in [A-Za-z_]*=*) continue ;; esac
        break
    done
    [[ $word =~ ^[A-Za-z0-9_./\$\{\}\"%#*:+-]+$ ]] || return 0
    eval "word=$word" 2> /dev/null || return 0
    base=${word##*/}
    if [[ $word == */* && $word != @BIN@/* && $word =~ ^[A-Za-z0-9_./+-]+$ && -n $base ]]; then
        local line= run="@BIN@/.record $word"
        if [[ -x @BIN@/$base ]]; then run=@BIN@/$base
        elif [[ -f $word ]]; then IFS= read -r line < "$word"; fi
        [[ $line == "#!"*sh* ]] || eval "function $word { $run \"\$@\"; }"
    fi
    return 0
}
trap '__recorder_guard 2> /dev/null' DEBUG
