#!/bin/sh
# Run a command in an image's files as a container runtime would: a mount and a process namespace of its own, the root
# read-only, no capabilities, no way to get any, and only the data folder and /tmp to write to.
#
#   unshare --mount --pid --fork --kill-child sh run_in_image.sh ROOT UID DATA WORKDIR COMMAND...
set -eu
root=$1 uid=$2 data=$3 workdir=$4
shift 4
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o "size=256m,uid=$uid,gid=$uid,mode=0750" tmpfs "$root$data"
mount --bind /dev "$root/dev"
mount -o remount,bind,ro "$root"
exec chroot "$root" \
    setpriv --reuid="$uid" --regid="$uid" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
    sh -c 'cd "$0" && exec "$@"' "$workdir" "$@"
