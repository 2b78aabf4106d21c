#!@BASH@ -p
# Goes on with the first word that names a program of its PATH or a script; its options are skipped.
PATH=@BIN@
words=("@NAME@" "$@")
while [ $# -gt 0 ]; do
    base=${1##*/}
    if [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "$1"
    elif [[ $1 != -* && -n $base && -x @BIN@/$base ]]; then shift; exec "@BIN@/$base" "$@"
    elif [[ $1 == *.sh ]]; then exec "@BIN@/bash" "$@"
    elif [[ $1 == *" "* && $1 =~ (torchrun|python|\.sh) ]]; then exec "@BIN@/bash" -c "$1"
    fi
    shift
done
exec "@BIN@/.record" "${words[@]}"
