//! CPU time and memory of processes, from `/proc`.

use std::time::Duration;

use anyhow::{Context as _, Result};

/// `/proc` counts in hundredths of a second on every Linux that Rust runs on.
const TICK: Duration = Duration::from_millis(10);

struct Stat {
    parent: u32,
    own: Duration,
    /// Of children that have ended and been waited for.
    ended_children: Duration,
}

pub fn cpu(pid: u32) -> Result<Duration> {
    Ok(stat(pid)?.own)
}

/// CPU time of a postmaster and of all its children, those that have ended included: its account takes theirs over.
pub fn cpu_with_children(pid: u32) -> Result<Duration> {
    let postmaster = stat(pid)?;
    let mut total = postmaster.own + postmaster.ended_children;
    for entry in std::fs::read_dir("/proc").context("list the processes")? {
        let Some(child) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end between being listed and being read.
        if let Ok(child) = stat(child)
            && child.parent == pid
        {
            total += child.own;
        }
    }
    Ok(total)
}

pub fn parent(pid: u32) -> Result<u32> {
    Ok(stat(pid)?.parent)
}

/// The most memory the process has had at a time, in bytes.
pub fn peak_memory(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("read a process's memory")?;
    let kilobytes = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .context("find VmHWM")?;
    Ok(kilobytes * 1024)
}

fn stat(pid: u32) -> Result<Stat> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("read the CPU time of process {pid}"))?;
    // The second field is the name in parentheses, which may hold blanks: count from after it, where field 3 is first.
    let (_, fields) = line.rsplit_once(')').context("read a line of /proc")?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let number = |field: usize| -> Result<u32> {
        fields
            .get(field - 3)
            .and_then(|text| text.parse().ok())
            .context("read a line of /proc")
    };
    Ok(Stat {
        parent: number(4)?,
        own: TICK * (number(14)? + number(15)?),
        ended_children: TICK * (number(16)? + number(17)?),
    })
}
