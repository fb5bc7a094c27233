#!/usr/bin/env bash
# hosts.sh N RATE COMMAND...: run COMMAND once on each of N emulated hosts joined by links of RATE (such as 1gbit, 200mbit).
# Each host is a network namespace of its own, on a bridge in a further namespace; RATE bounds what each host can send.
# COMMAND sees RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1 (unless set).
# Output of host 0 goes to the terminal, that of host K to $HOSTS_LOG.K where HOSTS_LOG is set, else nowhere.
# Exit status: the first non-zero one of the hosts. Needs root, iproute2 (ip, tc) and a kernel with veth, bridge and tbf.
set -u
if (($# < 3)); then sed -n '2,7s/^# //p' "$0"; exit 2; fi
n=$1 rate=$2; shift 2
tag=h$$
pids=()
cleanup() {
  for p in "${pids[@]:-}"; do [[ -n $p ]] && kill "$p" 2>/dev/null; done
  for ((i = 0; i < n; i++)); do ip netns del "$tag-$i" 2>/dev/null; done
  ip netns del "$tag-sw" 2>/dev/null
}
trap cleanup EXIT
trap 'exit 130' INT TERM
set -e
ip netns add "$tag-sw"
ip -n "$tag-sw" link add br0 type bridge
ip -n "$tag-sw" link set br0 up
for ((i = 0; i < n; i++)); do
  ip netns add "$tag-$i"
  ip -n "$tag-$i" link add eth0 type veth peer name "p$i" netns "$tag-sw"
  ip -n "$tag-sw" link set "p$i" master br0 up
  ip -n "$tag-$i" addr add "10.99.0.$((i + 1))/24" dev eth0
  ip -n "$tag-$i" link set lo up
  ip -n "$tag-$i" link set eth0 up
  tc -n "$tag-$i" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 100ms
done
set +e
export WORLD_SIZE=$n MASTER_ADDR=10.99.0.1 MASTER_PORT=${MASTER_PORT:-29511} GLOO_SOCKET_IFNAME=eth0
export LOCAL_RANK=0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for ((i = 1; i < n; i++)); do
  RANK=$i ip netns exec "$tag-$i" "$@" >"$(if [[ -n ${HOSTS_LOG:-} ]]; then echo "$HOSTS_LOG.$i"; else echo /dev/null; fi)" 2>&1 &
  pids+=($!)
done
RANK=0 ip netns exec "$tag-0" "$@"
code=$?
for p in "${pids[@]:-}"; do
  [[ -n $p ]] || continue
  wait "$p" || { c=$?; ((code == 0)) && code=$c; }
done
pids=()
exit "$code"
