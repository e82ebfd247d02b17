# What the installed with_advisory_lock gem locks, for each name on standard input, for
# numbers as names, and with WITH_ADVISORY_LOCK_PREFIX. The locks are really taken: the numbers are
# those of the statement sent, and pg_locks must agree.
require "logger" # Active Record 6.1 forgets it
require "active_record"
require "with_advisory_lock"

ActiveRecord::Base.establish_connection(ENV.fetch("DATABASE_URL"))

PREFIX = "WITH_ADVISORY_LOCK_PREFIX"
PAIR_IN_SQL = /\ASELECT pg_try_advisory_lock\((-?\d+),(-?\d+)\)/
HELD = <<~SQL
  SELECT classid || ',' || objid || ',' || objsubid FROM pg_locks
  WHERE locktype = 'advisory' AND pid = pg_backend_pid()
SQL

Sent = []
ActiveSupport::Notifications.subscribe("sql.active_record") do |*, payload|
  Sent << payload[:sql] if payload[:sql].include?("advisory") && !payload[:sql].include?("pg_locks")
end

# The pair, or the class of the error with which the gem refuses.
def pair_of(name, prefix)
  ENV[PREFIX] = prefix
  Sent.clear
  held = nil
  entered = ActiveRecord::Base.with_advisory_lock(name, 0) do
    held = ActiveRecord::Base.connection.select_values(HELD)
    true
  end
  raise "not acquired: #{name.inspect}" unless entered

  pair = PAIR_IN_SQL.match(Sent.first)&.captures&.map(&:to_i) or raise "not a pair: #{Sent.first}"
  # objsubid 2: the space of pairs.
  raise "#{pair} sent, #{held} held" unless held == ["#{pair.join(",")},2"]

  pair
rescue ArgumentError, NoMethodError, ActiveRecord::ActiveRecordError => e
  e.class
ensure
  ENV.delete(PREFIX)
end

def row(written, name, prefix, about)
  pair = pair_of(name, prefix)
  if pair.is_a?(Class)
    puts "# The gem refuses the next one: #{pair}"
    pair = [nil, nil]
  end
  puts [written, prefix ? "hex:#{prefix.unpack1("H*")}" : "unset", *pair, about].join("\t")
end

def number(value)
  "#{value.is_a?(Float) ? "float" : "int"}:#{value}"
end

def text(value)
  "hex:#{value.unpack1("H*")}"
end

pair_of("223 345", nil)
sent = Sent.map { |sql| sql.sub(/ AS t\h+/, " AS t<random>") }
pg = ActiveRecord::Base.connection.select_value("SHOW server_version").split.first

puts %w[name prefix gem_first gem_second about].join("\t")
puts "# Made by scripts/vectors; do not edit."
puts "# with_advisory_lock #{WithAdvisoryLock::VERSION}, Ruby #{RUBY_VERSION}, " \
     "Active Record #{ActiveRecord.version}, PostgreSQL #{pg}"
puts "# What it sent for \"223 345\", without #{PREFIX}:"
sent.each { |sql| puts "#   #{sql}" }
puts "# Found alike: 5.0.0, 5.3.0, 6.0.0, 7.0.0, 7.0.2, 7.5.0. For text also 3.1.1, 3.2.0 and 4.6.0, where"
puts "# 3.1.1 takes NUL as well, and 3.2.0 and 4.6.0 refuse numbers; 2.0.0 reads the same. From 0.0.9 to 1.0.0"
puts "# the key was one bigint: the CRC-32 of prefix and name, unmasked."
puts "# name: as in names.tsv; int:<decimal> and float:<decimal> are numbers in Ruby"
puts "# prefix: #{PREFIX}, as hex:<bytes>, or unset"
puts "# gem_first, gem_second: the two ints of pg_try_advisory_lock(int, int); empty where the gem refuses"

$stdin.each_line(chomp: true) do |written|
  _kind, unit, count = written.split(":")
  name = [unit || ""].pack("H*").force_encoding("UTF-8") * (count || 1).to_i
  row(written, name, nil, count ? "#{name.bytesize} bytes" : name.dump)
end

puts "# Numbers are not hashed: their integer part, masked."
[
  0, 1, 42, 223, -1, -42, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, -2**31, -2**31 - 1,
  2**63 - 1, -2**63, 2**63, 2**64 + 5, 10**20
].each { |n| row(number(n), n, nil, n.to_s) }
[0.0, 1.9, -1.9, 2147483648.5].each { |n| row(number(n), n, nil, n.to_s) }

puts "# The prefix is a number: what Ruby's String#to_i reads at its beginning, and 0 where it reads nothing."
[
  ["", "empty"],
  ["0", nil],
  ["7", nil],
  ["42", nil],
  ["-1", nil],
  ["+5", nil],
  ["2147483647", nil],
  ["2147483648", nil],
  ["4294967295", nil],
  ["4294967301", nil],
  ["99999999999999999999999", nil],
  ["-2147483648", nil],
  ["007", "decimal, not octal"],
  ["0x10", "not hexadecimal"],
  ["0b11", "not binary"],
  ["1_000", "underscore between digits"],
  ["1__000", "two underscores: reading ends"],
  ["_1", nil],
  ["1_", nil],
  ["1e3", nil],
  ["3.99", nil],
  ["  12", "leading spaces"],
  ["\t\n\v\f\r 12", "leading white space"],
  ["\u00a012", "leading no-break space: not white space"],
  ["12 34", nil],
  ["- 1", nil],
  ["--1", nil],
  ["+-1", nil],
  ["-0", nil],
  ["12\u0663", "an Arabic digit ends it"],
  ["myapp", "no number"],
  ["myapp2", "no number at the beginning"],
  ["2myapp", nil],
  ["production_", nil]
].each { |prefix, about| row(text("geocoder"), "geocoder", prefix, about || prefix.dump) }
["223 345", "nightly report", "job 4008307722", "日本語", "😀"].each { |name| row(text(name), name, "42", "#{name.dump} and 42") }
[5, -1].each { |n| row(number(n), n, "42", "#{n} and 42") }
row(text("5"), "5", "42", "a string of digits is no number")
