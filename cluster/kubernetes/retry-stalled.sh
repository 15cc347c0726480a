#!/bin/bash
# Runs a command and passes SIGTERM on to it: as a container's first process it would not get the signal before it
# has a handler, because the kernel keeps it away until then. Exit code 75 (another worker is gone, stalls or is
# late) becomes 203 (128 + 75): a TFJob tries only codes from 128 again.
trap 'told=yes; [ -z "${child:-}" ] || kill -TERM "$child"' TERM
"$@" &
child=$!
[ -z "${told:-}" ] || kill -TERM "$child"
wait "$child"
code=$?
# A signal ends wait before the command has ended.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
[ "$code" -eq 75 ] && code=203
exit "$code"
