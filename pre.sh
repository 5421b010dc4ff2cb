#!/bin/bash
exec /tmp/p1/op-je "$@"
