#!/bin/sh
# Installs Chromium, which the tests of `flashtune report` open pages in. Exits with 0 if it is
# there afterwards. Elsewhere than as root on Debian it installs nothing, and those tests are
# skipped with a line that says so.
command -v chromium > /dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! grep -q '^ID=debian$' /etc/os-release 2> /dev/null; then
    echo "SKIPPED: chromium is not installed, and apt installs it only as root on Debian"
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y -qq --no-install-recommends chromium > /dev/null; }
# A fresh image has no lists of packages, or old ones.
install 2> /dev/null || { timeout 120 apt-get update -qq && install; } && command -v chromium > /dev/null && exit 0
echo "SKIPPED: apt could not install chromium"
exit 1
