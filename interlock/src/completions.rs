//! `interlock completions` and `interlock man`, which clap writes.

use std::io::{self, Write};

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{Arguments, Failure};

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let mut text = Vec::new();
        clap_complete::generate(
            self.shell,
            &mut Arguments::command(),
            "interlock",
            &mut text,
        );
        io::stdout().write_all(&text)?;
        Ok(0)
    }
}

/// Writes one manual page for the program and all of its commands.
pub(crate) fn man() -> Result<i32, Failure> {
    let mut command = Arguments::command();
    command.build();
    let mut text = Vec::new();
    let man = clap_mangen::Man::new(command.clone());
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    man.render_extra_section(&mut text)?;
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        let name = subcommand.get_name();
        let long = format!("interlock {name}");
        let man = clap_mangen::Man::new(subcommand.clone().name(&*long.leak()));
        writeln!(text, ".SH \"INTERLOCK {}\"", name.to_uppercase())?;
        man.render_synopsis_section(&mut text)?;
        man.render_description_section(&mut text)?;
        man.render_options_section(&mut text)?;
    }
    io::stdout().write_all(&text)?;
    Ok(0)
}
