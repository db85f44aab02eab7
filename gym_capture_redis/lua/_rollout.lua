-- What every step on a rollout shares. scripts.py puts two lines in front, which define FORMAT (the newest format
-- this version reads) and CONFIRMED (see write_again); behind it the step itself, as a function `step`, and _each.lua.
-- Of the functions a script gets those that it names, directly or not (script_files.py).
--
-- Reply of every step: {code, incarnation, seq, version, ...}, or {'ERROR', text}, whose text begins with
-- CORRUPT, NEWER, or Redis' own WRONGTYPE. All errors come before any write.

local key, first -- of the entry at hand: its rollout, and where in ARGV its arguments begin
local wrote -- whether its step wrote anything

local STATE_FORM = '^(%d+) ([%w-]+) (%l+) ([%w-]*) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$'
local NO_BLOCK = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0' -- in place of a block's name
local DIGEST_END = 33 -- where the digest ends in a call's row; it tells the content, what follows the bytes
local MOST_STATE_BYTES = 400 -- of all words but the ends
local MOST_MARK_IDS = 32 -- that a failure keeps, each of 16 digits and a space
local MOST_DIGITS = 15 -- of a number that Lua counts exactly
local MOST_DETAILS_BYTES = 65600 -- of a refusal, with its code
local STEPS_AT_ONCE = 16 -- that are read before their size is known
local MOST_ARGUMENTS = 4000 -- of one command, names with their values: Lua has room for about 8,000

-- Argument number `number` of the entry at hand, as its step's header lists them.
local function arg(number)
  return ARGV[first + number]
end

-- A snapshot id is given by the freeze and stays; a rollout may be retired without one.
local function valid_status(status, snapshot)
  if status == 'open' then return snapshot == '' end
  return status == 'retired' or status == 'frozen' and snapshot ~= ''
end

-- The numbers stay strings until something is added to them, which Lua does without being asked.
local function parse_state(raw)
  local format, incarnation, status, snapshot, version, seq, records, intents, failures, refusals, blocks,
    ids, bytes, ends = string.match(raw, STATE_FORM)
  if format == FORMAT and valid_status(status, snapshot)
      and #version <= MOST_DIGITS and #seq <= MOST_DIGITS and #raw - #ends <= MOST_STATE_BYTES then
    return {
      incarnation = incarnation, status = status, snapshot = snapshot, version = version, seq = seq,
      records = records, intents = intents, failures = failures, refusals = refusals, blocks = blocks,
      ids = ids, bytes = bytes, ends = ends,
    }, nil
  end
  format = string.match(raw, '^(%d+) ')
  if format and tonumber(format) > tonumber(FORMAT) then return nil, {'ERROR', 'NEWER ' .. format} end
  return nil, {'ERROR', 'CORRUPT the state of the rollout is unreadable'}
end

-- The rollout's state as a table, or nil where there is none; an error to answer; values of other fields, false for
-- those that are not there.
local function load_state(...)
  local values = redis.pcall('HMGET', key, 's', ...)
  if values.err then return nil, {'ERROR', values.err}, {} end
  local raw = table.remove(values, 1)
  if raw then
    local state, err = parse_state(raw)
    return state, err, values
  end
  if redis.call('EXISTS', key) == 0 then return nil, nil, values end
  return nil, {'ERROR', 'CORRUPT the rollout has no state'}, values
end

local function format_state(state)
  return string.format('%s %s %s %s %d %d %d %d %d %d %d %d %d ',
    FORMAT, state.incarnation, state.status, state.snapshot, state.version, state.seq, state.records,
    state.intents, state.failures, state.refusals, state.blocks, state.ids, state.bytes) .. state.ends
end

-- The name with the time behind it: what a second copy of the same packet begins is another one.
local function timed(name)
  local now = redis.call('TIME')
  return string.format('%s-%x%05x', name, now[1], now[2])
end

-- A new rollout, which is there once its state is written.
local function new_state(name)
  return {
    incarnation = timed(name), status = 'open', snapshot = '', version = 0, seq = 0, records = 0,
    intents = 0, failures = 0, refusals = 0, blocks = 0, ids = 0, bytes = 0, ends = '',
  }
end

-- Writes the state, and other fields with it: names and values in turn. Returns how many of them are new.
local function write(state, ...)
  wrote = true
  return redis.call('HSET', key, 's', format_state(state), ...)
end

-- Removes the rollout.
local function remove()
  wrote = true
  redis.call('UNLINK', key)
end

-- Writes again what is there, where the step found all done: a wait for replicas or the disk covers only what
-- the same connection wrote, and the step may have been done over another one.
local function write_again()
  local raw = redis.call('HGET', key, 's')
  redis.call('HSET', key, 's', raw or '')
  if not raw then redis.call('UNLINK', key) end
end

-- Number of the next step, and the name of the field for its trace.
local function next_step(state)
  state.seq = state.seq + 1
  return string.format('o:%d', state.seq)
end

local function reply(code, state, ...)
  if not state then return {code, '', 0, 0, ...} end
  return {code, state.incarnation, state.seq, state.version, ...}
end

-- Writes the failure of a call, as one step. The first reason stays: a put that met a conflict is
-- followed by a mark of the same call, which knows less. The ids of the marks follow it, the newest ones.
local function mark_failure(state, call, failure_code, mark_id)
  local field = 'f:' .. call
  local trace = next_step(state)
  state.version = state.version + 1
  local failure = redis.call('HGET', key, field)
  if not failure then
    local now = redis.call('TIME')
    state.failures = state.failures + 1
    failure = string.format('%.0f ', now[1] * 1000 + math.floor(now[2] / 1000)) .. failure_code
  end
  local reason, mark_ids = string.match(failure, '^(%d+ %l+)(.*)$')
  if mark_id and reason then failure = reason .. string.sub(mark_ids .. ' ' .. mark_id, -17 * MOST_MARK_IDS) end
  write(state, trace, '0:' .. field, field, failure)
end

-- Marks a rollout that lacks what another server acknowledged, or that this one does not know at all; then the
-- mark stays for a day, as the rollout may have been consumed long ago. Once is enough for the rollout as a whole.
local function mark_lost_rollout(state, new_incarnation)
  if state and redis.call('HEXISTS', key, 'f:') == 1 then return reply('LOST', state) end
  local begins = not state
  state = state or new_state(new_incarnation)
  mark_failure(state, '', 'lost')
  if begins then redis.call('EXPIRE', key, 86400) end
  return reply('LOST', state)
end

-- A rollout that was there only by a mark for a day stays, now that somebody has spoken of it.
local function keep(state)
  if tonumber(state.failures) > 0 then redis.call('PERSIST', key) end
end

-- Names of chain ends without this one.
local function without_end(ends, name)
  local at = string.find(ends, name, 1, true)
  return at and string.sub(ends, 1, at - 1) .. string.sub(ends, at + 16) or ends
end

-- 1 if the rollout holds an entry, a mark or an intent, else 0.
local function holds(state)
  return state.records + state.failures + state.intents > 0 and 1 or 0
end

-- Replaces the rollout by its tombstone.
local function retire(state, ttl_s)
  remove()
  state.status = 'retired'
  state.records, state.intents, state.failures, state.refusals = 0, 0, 0, 0
  state.blocks, state.ids, state.bytes, state.ends = 0, 0, 0, ''
  write(state)
  redis.call('EXPIRE', key, ttl_s)
end

-- What a step wrote, by the trace it left: name of its field, names of its blocks (16 bytes each, in one
-- string); for an unreadable trace the trace itself, and nil.
local function read_trace(trace)
  local count, rest = string.match(trace or '', '^(%d+):(.*)$')
  local names_end = 16 * (tonumber(count) or 0)
  if not rest or names_end > #rest then return trace, nil end -- a damaged count must not be counted to
  return string.sub(rest, names_end + 1), string.sub(rest, 1, names_end)
end

-- Values of fields, in the order of their names; false for those that are not there.
local function fetch(names)
  local values = {}
  for from = 1, #names, MOST_ARGUMENTS do
    local to = math.min(#names, from + MOST_ARGUMENTS - 1)
    for _, value in ipairs(redis.call('HMGET', key, unpack(names, from, to))) do
      values[#values + 1] = value
    end
  end
  return values
end

-- Appends to `wanted` the fields that show what a step wrote: its value, its call's row, its blocks.
local function want(wanted, field, names)
  local kind, call_row = string.sub(field, 1, 2), 'c:' .. string.sub(field, 3)
  local count = #wanted
  -- Intents and refusals are their call's row.
  wanted[count + 1], wanted[count + 2] = (kind == 'n:' or kind == 'x:') and call_row or field, call_row
  for at = 1, #names / 16 do wanted[count + 2 + at] = 'b:' .. string.sub(names, 16 * at - 15, 16 * at) end
end

-- Puts these values, from number `at` on, into the row of a step. Returns how many bytes they have, and whether
-- there is anything to tell: an intent that is settled by now says nothing.
local function fill(row, values, at)
  local kind, value = string.sub(row[1], 1, 2), values[at]
  local bytes, blocks = value and #value or 0, row[5]
  row[2], row[3] = value, kind == 'r:' and values[at + 1]
  for number = 1, #row[4] / 16 do
    local block = values[at + 1 + number]
    blocks[number] = block
    bytes = bytes + (block and #block or 0)
  end
  return bytes, not (kind == 'n:' and value and value ~= 'n')
end

-- Appends what the steps from number `from` on wrote to `rows`, up to about max_bytes and 1,000 steps:
-- {what the step wrote (kind and call), its value, the call's row (for a record), names of the blocks it
-- brought, the blocks}; of a stage, 'p:' and the name of its part, which is read by itself; of a step that is not
-- there, nothing and its number. Settled intents are left out. Returns the number to go on from.
local function collect_rows(state, from, max_bytes, rows)
  local traces = {}
  for seq = from, math.min(tonumber(state.seq), from + 999) do traces[#traces + 1] = 'o:' .. seq end
  traces = fetch(traces)
  -- Where all of the rollout is less than max_bytes, some steps are read at once and not measured before. That the
  -- state says too little comes to light with the first of them.
  local all_bytes = state.bytes + MOST_DETAILS_BYTES * state.refusals
  local bytes, at = 0, 1
  while at <= #traces and (bytes < max_bytes or at == 1) do
    local begun, wanted, starts = #rows, {}, {}
    local is_small = math.max(all_bytes, bytes) <= max_bytes
    local last = is_small and math.min(#traces, at + STEPS_AT_ONCE - 1) or at
    repeat
      local field, names = read_trace(traces[at])
      if not is_small and bytes > 0 and names and string.sub(field, 1, 2) == 'r:'
          and bytes + redis.call('HSTRLEN', key, field) + 64 * #names > max_bytes then
        return from + at - 1
      end
      local row = {field, false, false, names or '', {}}
      rows[#rows + 1], starts[#starts + 1] = row, #wanted + 1
      if names and field ~= 'p:' then want(wanted, field, names) else starts[#starts] = false end
      if not field then row[2] = string.format('%d', from + at - 1) end
      at = at + 1
    until at > last
    local values, kept = fetch(wanted), begun
    for number, start in ipairs(starts) do
      local row, tells, nbytes = rows[begun + number], true, 0
      if start then nbytes, tells = fill(row, values, start) end
      bytes = bytes + nbytes
      if tells then kept = kept + 1 rows[kept] = row end
    end
    for number = #rows, kept + 1, -1 do rows[number] = nil end
  end
  return from + at - 1
end
