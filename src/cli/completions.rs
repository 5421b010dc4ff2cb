//! `opledger completions`: the completion script of a shell, on stdout.

use std::process::ExitCode;

use clap_complete::Shell;

use super::exit::Exit;
use super::output;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger completions bash > /etc/bash_completion.d/opledger
  opledger completions zsh > \"${fpath[1]}/_opledger\"
  opledger completions fish > ~/.config/fish/completions/opledger.fish")]
pub struct Args {
    /// The shell to complete in
    shell: Shell,
}

pub fn run(args: Args, mut command: clap::Command) -> anyhow::Result<ExitCode> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    output::print(script)?;
    Ok(Exit::Done.into())
}
