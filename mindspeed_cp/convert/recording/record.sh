#!@BASH@ -p
# Writes the words of a command to a file of its own.
set -C
until { printf '%s\0' "@NAME@" "$@" > "@RECORDS@/$BASHPID.$RANDOM"; } 2> /dev/null; do :; done
