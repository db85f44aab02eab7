-- Stores a record with the token blocks that are new, and settles its intent.
-- args[1]  incarnation of the attempt that the record belongs to
-- args[2]  call
-- args[3]  digest of the record's content
-- args[4]  the encoded record
-- args[5]  how many token ids its prompt and generation have
-- args[6]  name of the block that the first of the new ones follows; 16 zero bytes for none
-- args[7]  name of the record's last full block; 16 zero bytes for none
-- args[8…] the new blocks, parents first: name, value
-- Reply    OK | SAME (stored already) | MISSING (the block of args[6] is not stored; nothing changed) |
--          CONFLICT (other content, or refused: the rollout is now incomplete) | FROZEN |
--          RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
local call, digest, record, base, last = args[2], args[3], args[4], args[6], args[7]
if not state or state.incarnation ~= args[1] or state.status == 'retired' then
  return reply('RETIRED', state)
end
local wanted = {'i:' .. call, 'x:' .. call, 'n:' .. call, 'b:' .. base}
for at = 8, #args, 2 do wanted[#wanted + 1] = 'b:' .. args[at] end
local known = fetch(wanted)
if known[1] == digest then return reply('SAME', state) end
if state.status == 'frozen' then return reply('FROZEN', state) end
if known[1] or known[2] then
  mark_failure(state, call, 'conflict')
  return reply('CONFLICT', state)
end
if base ~= NO_BLOCK and not known[4] then return reply('MISSING', state) end

local names, fields = {}, {}
state.bytes = state.bytes + #record
for number = 5, #wanted do
  if not known[number] then
    local at = 2 * number - 2
    names[#names + 1] = args[at]
    fields[#fields + 1] = wanted[number]
    fields[#fields + 1] = args[at + 1]
    state.bytes = state.bytes + #args[at + 1]
  end
end
-- The newest three ends of chains: this one instead of the one it goes on from.
local ends = {}
for at = 1, #state.ends, 16 do
  local kept = string.sub(state.ends, at, at + 15)
  if kept ~= last and kept ~= base then ends[#ends + 1] = kept end
end
if last ~= NO_BLOCK then ends[#ends + 1] = last end
if #ends > 3 then table.remove(ends, 1) end

if known[3] then
  redis.call('HDEL', key, 'n:' .. call)
  state.intents = state.intents - 1
end
state.seq = state.seq + 1
state.version = state.version + 1
state.records = state.records + 1
state.blocks = state.blocks + #names
state.ids = state.ids + tonumber(args[5])
state.ends = table.concat(ends)
for _, value in ipairs({
  'o:' .. state.seq, #names .. ':' .. table.concat(names) .. 'r:' .. call,
  'i:' .. call, digest, 'r:' .. call, record,
}) do fields[#fields + 1] = value end
write(state, fields)
return reply('OK', state)
