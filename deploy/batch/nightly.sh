#!/bin/sh
# The night's work: a backup, the proof that it is whole, then compaction. Once with `now`; with `every-night` at
# NIGHTLY_AT (03:30), UTC, until it is stopped. POSTDATE_ADDRESS names the broker, whose data directory is mounted at
# DATA_DIR (/data); SPARK_MASTER a cluster (local[2]); PUSHGATEWAY, if set, takes the audit's metrics.
# Exit status: 0 all done, 1 compaction was refused in part, else that of the step that failed.
set -u
master=${SPARK_MASTER:-local[2]}

say() { echo "nightly: $*" >&2; }

work() {
    folder=$(postdate-broker backup create nightly) || { say "there is no backup, so nothing to audit"; return 3; }
    postdate-broker audit "$folder" --master "$master" --level standard --report "${REPORTS:-/reports}" \
        ${PUSHGATEWAY:+--pushgateway "$PUSHGATEWAY"}
    code=$?
    # 1 is warnings only. Where an audit found damage nothing is rewritten: somebody should look first.
    [ "$code" -le 1 ] || { say "the audit ended with $code: no compaction tonight"; return "$code"; }
    postdate-broker compact --data-dir "${DATA_DIR:-/data}" --master "$master" --apply
}

case ${1:-now} in
now) work ;;
every-night)
    while :; do
        now=$(date -u +%s)
        next=$(date -u -d "${NIGHTLY_AT:-03:30}" +%s) || exit 64
        [ "$next" -gt "$now" ] || next=$((next + 86400))
        say "next at $(date -u -d "@$next" +%FT%TZ)"
        sleep $((next - now))
        work
        say "ended with $?"
    done
    ;;
*)
    say "now or every-night, not $1"
    exit 64
    ;;
esac
