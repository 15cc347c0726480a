#!/bin/bash
# Runs a command and passes SIGTERM on to it. Exit code 75, a stalled worker, becomes 203 (128 + 75): a TFJob tries
# only codes from 128 again.
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"
code=$?
# A signal ends wait before the command has ended.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
[ "$code" -eq 75 ] && code=203
exit "$code"
