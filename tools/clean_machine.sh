#!/usr/bin/env bash
# Tries the README on a machine that has nothing: Debian 12 from debootstrap, with what the README names, a clean clone
# of HEAD, an ordinary user, and `make test`. Needs root, debootstrap, and indexes of packages as this machine uses them.
#
#   tools/clean_machine.sh [--times N] [--busy] [--keep] [--root FOLDER] [--run COMMAND]
#
#   --times N   run the tests N times in a row; the first that fails ends it
#   --busy      run them once more, beside a process that takes a whole core
#   --keep      leave the machine there; the next run with the same --root goes on with it, on a new clone
#   --root      where it lies (default: a temporary folder)
#   --run       another command than `make test`: --run "make setup", --run 'make test ARGS="tests/jobs -x"'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

times=1 busy= keep= root= command="make test"
while [ "$#" -gt 0 ]; do
    case $1 in
        --times) times=$2; shift ;;
        --busy) busy=1 ;;
        --keep) keep=1 ;;
        --root) root=$2; shift ;;
        --run) command=$2; shift ;;
        *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || { echo "clean_machine: debootstrap and chroot need root" >&2; exit 1; }
command -v debootstrap > /dev/null || { echo "clean_machine: apt-get install debootstrap" >&2; exit 1; }

root=${root:-$(mktemp -d "${TMPDIR:-/var/tmp}/postdate-clean.XXXXXX")}
hog=
clean_up() {
    [ -z "$hog" ] || kill "$hog" 2> /dev/null || true
    for mounted in proc dev/shm dev; do
        ! mountpoint -q "$root/$mounted" || umount -l "$root/$mounted"
    done
    # Not while anything of this machine is mounted below.
    if [ -z "$keep" ] && ! grep -qs " $root/" /proc/mounts; then rm -rf "$root"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

echo "== a Debian 12 with nothing in $root"
if [ ! -e "$root/etc/debian_version" ]; then
    debootstrap --variant=minbase bookworm "$root" > "$root.log" || { tail -20 "$root.log" >&2; exit 1; }
fi
mount --rbind /dev "$root/dev" && mount --make-rslave "$root/dev"
mount -t proc proc "$root/proc"

# The network, the authorities and the indexes of packages are those of this machine.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
rm -rf "$root/etc/apt" && cp -a /etc/apt "$root/etc/apt"
find "$root/etc/apt/sources.list.d" -type f ! -name 'debian*' -delete 2> /dev/null || true
mkdir -p "$root/usr/share/keyrings" "$root/etc/ssl" "$root/usr/share/ca-certificates" "$root/usr/local/share"
cp -aL /usr/share/keyrings/. "$root/usr/share/keyrings/"
copy_certificates() { rm -rf "$root/etc/ssl/certs" && cp -aL /etc/ssl/certs "$root/etc/ssl/certs"; }
copy_certificates
[ ! -e /etc/pip.conf ] || cp -L /etc/pip.conf "$root/etc/pip.conf"
[ ! -e "$HOME/.npmrc" ] || cp -L "$HOME/.npmrc" "$root/etc/npmrc"
environ=()
while IFS= read -r name; do environ+=("$name=${!name}"); done < <(
    compgen -e | grep -iE '^(pip_|npm_config_|(http|https|no|all)_proxy$|ssl_cert_|requests_ca_bundle$|node_extra_ca_certs$)'
)
for folder in ${PIP_FIND_LINKS:-}; do # wheels of this machine
    [ ! -d "$folder" ] || { mkdir -p "$root$folder" && cp -a "$folder/." "$root$folder/"; }
done

inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "${environ[@]}" "$@"; }
user() { inside su newcomer -s /bin/bash -w "$(printf '%s\n' "${environ[@]%%=*}" | paste -sd,)" -c "$1"; }

inside apt-get update -qq
inside env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    git make python3.11 python3.11-venv > /dev/null
copy_certificates # a package may have written them anew
inside sh -c 'id newcomer > /dev/null 2>&1 || useradd -m newcomer'
! inside sh -c 'command -v java' || { echo "clean_machine: there is a Java, so it is not what it should be" >&2; exit 1; }

echo "== a clean clone of $(git rev-parse --short HEAD)"
git bundle create -q "$root/tmp/postdate.bundle" HEAD
chmod 644 "$root/tmp/postdate.bundle"
user 'rm -rf ~/postdate && git clone -q /tmp/postdate.bundle ~/postdate'

for ((turn = 1; turn <= times; turn++)); do
    echo "== $command ($turn of $times)"
    user "cd ~/postdate && $command" < /dev/null
done
if [ -n "$busy" ]; then
    echo "== $command, beside a process that takes a core"
    (while :; do :; done) &
    hog=$!
    user "cd ~/postdate && $command" < /dev/null
fi
echo "== all well"
